"""Weights of the Hub on the disk when their turn comes, within a budget."""
