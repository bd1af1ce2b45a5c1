"""The race: rounds on more and more documents, for whoever wants the winner alone."""
