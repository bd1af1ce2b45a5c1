"""Checkpoints on this machine: names, headers and bytes to tensors."""
