"""Errors by position in the window, from sums that every measurement has."""
