"""What other distributions register."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PluginKind = Literal["scheme", "merge", "format", "diagnostic"]


@dataclass(frozen=True)
class Plugin:
    """A plug-in of another distribution, which measured what an audit has of it."""

    kind: PluginKind
    name: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip()
