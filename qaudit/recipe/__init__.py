"""A recipe: what a person asked for, as a value; then which checkpoints and soups it means.

`table` reads YAML and options and names every wrong key, `selection` picks checkpoints of a
series, `soups` makes subjects of them.
"""

from qaudit.recipe.selection import is_telling, select
from qaudit.recipe.soups import SoupRequest, members_of, needed, parse_soup, resolve_soups
from qaudit.recipe.table import DEMO, is_recipe, read_recipe, recipe_of

__all__ = ["DEMO", "SoupRequest", "is_recipe", "is_telling", "members_of", "needed"]
__all__ += ["parse_soup", "read_recipe", "recipe_of", "resolve_soups", "select"]
