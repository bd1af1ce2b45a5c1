"""A recipe, resolved to hashes, and what it will cost. No torch."""
