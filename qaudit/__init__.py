"""Audit what quantization does to the checkpoints and soups of a training run.

    import qaudit
    audit = qaudit.scan("demo", schemes=["rtn-4bit", "gptq-4bit"])
    audit.pick, audit.measurements.to_pandas()

The names are loaded when they are used, so that `qaudit --help` and every command that judges
or renders a saved audit start at once.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qaudit.audit import Audit, gate, load, pick, plan, scan
    from qaudit.errors import QauditError

__version__ = "0.1.0.dev0"
__all__ = ["Audit", "QauditError", "gate", "load", "pick", "plan", "scan"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module `qaudit` has no attribute `{name}`")
    home = "qaudit.errors" if name == "QauditError" else "qaudit.audit"
    return getattr(import_module(home), name)


def recipes_folder() -> Path:
    """Return the folder of recipes that ship with this installation.

    A wheel carries it inside the package; in a checkout or an editable install it is
    beside the package, where people read and change it.
    """
    package = Path(__file__).resolve().parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"
