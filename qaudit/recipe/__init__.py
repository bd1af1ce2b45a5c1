"""Recipes: read and check them, then resolve which checkpoints and soups they name.

`table` reads YAML or keyword arguments and checks them, `selection` picks checkpoints of a
series, and `soups` makes subjects of them.
"""
