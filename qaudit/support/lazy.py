"""`torch`, loaded where something of it is first used, so that importing a module is cheap.

`from qaudit.support.lazy import Tensor, torch` in place of an import in each function: `--help`,
`gate` and `report` never load it. Type checkers see torch itself. A module that loads it anyway,
by deriving from its classes, imports it as any other package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:
    from importlib import import_module
    from types import ModuleType

    class _Lazy(ModuleType):
        """A module that is imported at the first use of an attribute."""

        def __getattr__(self, name: str) -> object:
            loaded = vars(self).get("_loaded")
            if loaded is None:
                loaded = self._loaded = import_module(self.__name__)
            return getattr(loaded, name)

    torch = _Lazy("torch")

    class _IsTensor(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, torch.Tensor)

    class Tensor(metaclass=_IsTensor):
        """What annotations and `isinstance` name; torch's own class is `torch.Tensor`."""
