"""Schemes, one file each; a module in this package is registered (`core/registry.py`)."""
