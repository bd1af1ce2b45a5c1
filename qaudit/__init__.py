"""Audit what quantization does to the checkpoints and soups of a training run.

    import qaudit
    audit = qaudit.scan("demo", schemes=["rtn-4bit", "gptq-4bit"])
    audit.pick, audit.measurements.to_pandas()

The names are loaded when they are used, so that `qaudit --help` and every command that judges
or renders a saved audit start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qaudit.version import __version__

if TYPE_CHECKING:
    from qaudit.audit import Audit, gate, load, pick, plan, scan
    from qaudit.errors import QauditError

__all__ = ["Audit", "QauditError", "__version__", "gate", "load", "pick", "plan", "scan"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module `qaudit` has no attribute `{name}`")
    home = "qaudit.errors" if name == "QauditError" else "qaudit.audit"
    return getattr(import_module(home), name)
