"""Small checkpoint series, the demo's among them, and controlled experiments on them.

Run as `python -m experiments` in a clone; the wheel has none of it.
"""
