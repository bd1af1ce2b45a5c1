"""The layouts in which files hold quantized weights."""
