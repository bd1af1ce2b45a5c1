"""Any decoder model as a front, blocks and a head, none of which is ever there as a whole."""
