"""Change points, the end of improvement and correlations along a run; computed for every audit."""
