"""The laboratory: trains small checkpoint series, the demo's own among them."""
