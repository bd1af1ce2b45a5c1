"""The race: rounds on more and more documents, to find the winner alone."""
