"""Statistics of short series: change points, associations, predictions."""
