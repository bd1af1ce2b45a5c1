"""Diagnostics, one file each; lying here registers them (`core/registry.py`)."""
