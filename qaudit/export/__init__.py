"""A soup as a folder that anything can load."""
