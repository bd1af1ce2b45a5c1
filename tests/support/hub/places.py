"""What an address names."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.hub.repositories import Kind


@dataclass(frozen=True)
class Place:
    """The words that a route found in an address."""

    kind: Kind = "model"
    owner: str = ""
    name: str = ""
    revision: str = "main"
    path: str = ""
    number: str = ""
    verb: str = ""

    @property
    def repo(self) -> str:
        """The repo's key in `Hub.repos`."""
        prefix = "datasets/" if self.kind == "dataset" else ""
        return f"{prefix}{self.owner}/{self.name}"
