"""Kurtosis, outliers, ranges and distance to the grid of the weights, and how schemes move them."""
