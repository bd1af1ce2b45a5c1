"""An audit as JSON, and back: what others may build on, row by row."""
