"""The race: rounds on more and more documents, when only the winner is wanted."""
