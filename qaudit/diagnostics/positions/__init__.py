"""Loss and errors by where in its window a token is."""
