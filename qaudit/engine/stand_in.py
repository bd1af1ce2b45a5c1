"""A scheme that goes by the name of another one, so that nothing else in the engine knows.

Code that records what a scheme does, or replaces a part of it, wraps it: its measurements then
have the identity of the scheme itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from qaudit.core.scheme import Scheme


@dataclass(frozen=True, kw_only=True)
class StandIn(Scheme):
    """Another scheme by its name, its version and its remark."""

    inner: Scheme

    def __post_init__(self) -> None:
        """Take over what an identity is made of."""
        object.__setattr__(self, "name", self.inner.name)
        object.__setattr__(self, "version", self.inner.version)
        object.__setattr__(self, "kv", self.inner.kv)

    @property
    def rotates_outputs(self) -> bool:
        """Ask for what the scheme asks for."""
        return self.inner.rotates_outputs

    @property
    def rotates_heads(self) -> bool:
        """Round as the scheme does."""
        return self.inner.rotates_heads

    @property
    def short(self) -> str:
        """Go by the scheme's name."""
        return self.inner.short

    @property
    def spec(self) -> str:
        """Go by the scheme's name."""
        return self.inner.spec

    @property
    def remark(self) -> str | None:
        """Return what the scheme says."""
        return self.inner.remark
