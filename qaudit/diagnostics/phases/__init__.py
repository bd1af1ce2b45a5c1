"""Change points and the end of improvement along a run; computed for every audit."""
