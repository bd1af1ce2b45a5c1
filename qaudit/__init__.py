"""Audit what quantization does to the checkpoints and soups of a training run.

This module stays light: importing it reads no model library, so that `qaudit --help` and
every command that judges or renders a saved audit start at once.
"""

from pathlib import Path

__version__ = "0.1.0.dev0"


def recipes_folder() -> Path:
    """Return the folder of recipes that ship with this installation.

    A wheel carries it inside the package; in a checkout or an editable install it stands
    beside the package, where people read and change it.
    """
    package = Path(__file__).resolve().parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"
