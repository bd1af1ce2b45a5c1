"""Loss and errors by where in its window a token is, and by its role in a conversation."""
