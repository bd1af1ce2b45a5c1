"""The joins: bytes and text in, measurements out."""
