"""The laboratory: trains small checkpoint series, the demo's among them, and runs experiments."""
