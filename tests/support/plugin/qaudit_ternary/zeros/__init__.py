"""How many weights are zero."""
