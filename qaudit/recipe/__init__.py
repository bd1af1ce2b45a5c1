"""Recipes: read and check them, then resolve which checkpoints and soups they name.

`table` reads YAML and checks keys, `arguments` takes keyword arguments, `selection` picks
checkpoints of a series, `soups` makes subjects of them.
"""

from qaudit.recipe.arguments import recipe_and_options, split_settings
from qaudit.recipe.selection import is_telling, select
from qaudit.recipe.soups import SoupRequest, members_of, needed, parse_soup, resolve_soups
from qaudit.recipe.table import DEMO, is_recipe, read_recipe, recipe_of

__all__ = ["DEMO", "SoupRequest", "is_recipe", "is_telling", "members_of", "needed"]
__all__ += ["parse_soup", "read_recipe", "recipe_and_options", "recipe_of", "resolve_soups"]
__all__ += ["select", "split_settings"]
