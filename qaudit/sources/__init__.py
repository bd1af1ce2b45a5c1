"""Bytes in: checkpoints and text, from folders and files."""
