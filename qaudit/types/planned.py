"""The plan: a recipe resolved, and what it will cost."""

from __future__ import annotations

from dataclasses import dataclass

from qaudit.settings import Recipe
from qaudit.types.judged import Finding
from qaudit.types.subjects import Subject
from qaudit.types.text import TextFile


@dataclass(frozen=True)
class Traffic:
    """What a plan takes from the Hub, and what it leaves on the disk at its worst moment."""

    nbytes_to_fetch: int
    nbytes_cached: int
    nbytes_disk_peak: int
    nbytes_disk_free: int
    nbytes_disk_budget: int | None = None


@dataclass(frozen=True)
class Price:
    """What work costs."""

    flops: float = 0.0
    nbytes_read: int = 0  # of weights
    streams: int = 0  # models that are evaluated

    def __add__(self, other: Price) -> Price:
        """Return the price of both."""
        return Price(
            self.flops + other.flops,
            self.nbytes_read + other.nbytes_read,
            self.streams + other.streams,
        )


@dataclass(frozen=True)
class Pass:
    """One subject sent once through its blocks, every stream side by side.

    A released soup (`subject.is_release`) is compared with its ingredients and has no streams.
    """

    subject: Subject
    schemes: tuple[str, ...]  # in canonical form
    full_precision: bool = True  # whether the model is evaluated as it is, too
    draw: int = 0  # of the calibration text
    reordered: bool = False  # the same sums in another order: measures the numerical floor
    price: Price = Price()


@dataclass(frozen=True)
class Plan:
    """The recipe resolved and priced, before the first byte of weights is read."""

    recipe: Recipe
    subjects: tuple[Subject, ...]
    specs: tuple[str, ...]
    device: str
    dtype: str
    context: int
    parameters: int
    blocks: int
    nbytes_read: int
    nbytes_memory: int
    nbytes_memory_fixed: int
    nbytes_memory_available: int
    streams: int  # models that are evaluated, in all passes
    seconds_low: float
    seconds_high: float
    notes: tuple[str, ...] = ()
    texts: tuple[TextFile, ...] = ()
    traffic: Traffic | None = None  # None: every target is a local folder
    findings: tuple[Finding, ...] = ()  # what is wrong by names and hashes alone
    releases: tuple[Subject, ...] = ()  # compared with the soups that they are described as
    detectable_relative_error: float | None = None  # with 80 % power, by what is measured already
    diagnoses: tuple[str, ...] = ()  # requested of each subject, and their cost
    passes: tuple[Pass, ...] = ()  # the work itself, in order; not saved with an audit
