"""Races: rounds on more and more documents, which find the winner alone."""
