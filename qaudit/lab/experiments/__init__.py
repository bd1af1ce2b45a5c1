"""Controlled experiments: what is trained, what is measured, and which claim that answers."""
