"""What it is measured on: documents, how they are cut, and the corpus they become."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from qaudit.types.subjects import digest


@dataclass(frozen=True)
class Document:
    """A named text, the unit of analysis."""

    name: str
    text: str
    stratum: str = ""  # the value of the field that `strata` names

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Choice:
    """A multiple-choice item: the log-likelihood of each option after the context decides."""

    name: str
    context: str
    options: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Protocol:
    """How text becomes windows of tokens, and how many."""

    context: int
    stride: int
    bos: Literal["auto", "always", "never"] = "auto"
    packed: bool = False
    evaluation_documents: int = 64
    calibration_documents: int = 64
    document_tokens: int | None = None
    calibration_seed: int = 0


@dataclass(frozen=True, eq=False)
class Window:
    """A run of tokens that goes through the model at once.

    Tokens before `scored_from` are context: they are read, and their loss is not counted.
    """

    document: int
    tokens: npt.NDArray[np.int32]
    scored_from: int = 1

    @property
    def scored(self) -> int:
        """Number of tokens whose loss is counted."""
        return len(self.tokens) - self.scored_from


SELECTION, HELD_OUT = "selection", "held-out"
"""Documents to choose on, and documents to report on: the winner on the first was partly lucky."""


@dataclass(frozen=True)
class EvaluationDocument:
    """What is known of an evaluation document once it is cut: its name, hash and scored bytes."""

    name: str
    sha256: str
    nbytes: int
    split: str = SELECTION
    stratum: str = ""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Calibration and evaluation text as tokens, with its hashes and the protocol that cut it.

    Windows of choices stand after those of documents; their `document` counts (item, option)
    pairs in order, from zero, and `choices` has the options of each item.
    """

    protocol: Protocol
    calibration: tuple[Window, ...]
    evaluation: tuple[Window, ...]
    documents: tuple[EvaluationDocument, ...]
    choices: tuple[Choice, ...] = ()
    choice_windows: tuple[Window, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    further: tuple[tuple[Window, ...], ...] = ()  # calibration of the seeds that follow

    @property
    def draws(self) -> tuple[Corpus, ...]:
        """The same evaluation text with every draw of calibration text, this one first."""
        seed = self.protocol.calibration_seed
        return tuple(
            replace(
                self,
                protocol=replace(self.protocol, calibration_seed=seed + k),
                calibration=windows,
                further=(),
            )
            for k, windows in enumerate((self.calibration, *self.further))
        )

    @property
    def strata(self) -> tuple[str, ...]:
        """The stratum of each evaluation document, or nothing where they are not grouped."""
        strata = tuple(document.stratum for document in self.documents)
        return strata if any(strata) else ()

    @cached_property
    def sha256(self) -> str:
        """Identify every token that is fed, every one that is scored, and what for.

        Strata are left out: they group results and change none.
        """
        windows = (self.calibration, self.evaluation, self.choice_windows)
        cut = [[(w.document, w.tokens.tolist(), w.scored_from) for w in part] for part in windows]
        return digest([cut, [document.split for document in self.documents]])


@dataclass(frozen=True)
class TextFile:
    """A text that is a file in a Hub dataset, pinned to a commit and to the hash of its bytes."""

    source: str  # as it was requested: hf://datasets/org/name[@revision]/path[::field]
    repo: str
    commit: str
    path: str
    nbytes: int
    sha256: str  # or `git:...`, as for weights
