"""What is asked for, resolved to hashes, and what it will cost. No torch."""
