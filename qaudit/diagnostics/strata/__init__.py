"""Errors by group of documents, and by role in a conversation."""
