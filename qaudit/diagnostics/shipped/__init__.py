"""Files that are quantized already: ranked by bytes and KL divergence, damage by its signs."""
