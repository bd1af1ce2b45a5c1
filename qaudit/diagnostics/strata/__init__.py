"""Errors by group of documents, by position in the window, and by role in a conversation."""
