"""What each stream makes of rollouts: how far it is from them, and where it would leave them."""
