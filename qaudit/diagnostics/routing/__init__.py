"""Routing: which layers of experts send tokens elsewhere than in full precision."""
