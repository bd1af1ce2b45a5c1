"""A scheme that goes by the name of another one, so that nothing else in the engine knows.

Code that records what a scheme does, or replaces a part of it, wraps it: its measurements then
have the identity of the scheme itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from qaudit.core.linears import Linears, Quantized
from qaudit.core.scheme import Scheme
from qaudit.core.whole_block import Quantize, WholeBlock


@dataclass(frozen=True, kw_only=True)
class StandIn(Scheme):
    """Another scheme by its name, its version and its remark."""

    inner: Scheme

    def __post_init__(self) -> None:
        """Take over what an identity is made of."""
        object.__setattr__(self, "name", self.inner.name)
        object.__setattr__(self, "version", self.inner.version)
        object.__setattr__(self, "kv", self.inner.kv)

    def quantize(self, linears: Linears) -> Quantized:
        return self.made(linears, self.inner.quantize(linears))

    def train(self, block: WholeBlock) -> Quantize:
        quantize = self.inner.train(block)
        return lambda linears: self.made(linears, quantize(linears))

    def made(self, linears: Linears, quantized: Quantized) -> Quantized:
        """Return what takes the place of what the scheme made."""
        raise NotImplementedError

    @property
    def rotates_outputs(self) -> bool:
        """Ask for what the scheme asks for."""
        return self.inner.rotates_outputs

    @property
    def rotates_heads(self) -> bool:
        """Round as the scheme does."""
        return self.inner.rotates_heads

    @property
    def cache_clip(self) -> float:
        """Cut ranges as the scheme does."""
        return self.inner.cache_clip

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
