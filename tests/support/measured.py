"""Measurements that no model gave, with the class that their scheme has."""

from __future__ import annotations

import numpy as np
import torch

from qaudit.core.registry import parse_scheme
from qaudit.engine.tasks import Machine
from qaudit.errors import SchemeError
from qaudit.types import (
    FULL_PRECISION,
    Corpus,
    EvaluationDocument,
    Evidence,
    Measurement,
    Protocol,
    Window,
)


def measurement(
    subject: str,
    scheme: str,
    spec: str,
    evidence: Evidence,
    bits: float,
    seed: int = 0,
    notes: tuple[str, ...] = (),
) -> Measurement:
    name, calibrates = str(int(bits)), False
    try:
        if scheme == FULL_PRECISION:
            name = FULL_PRECISION
        else:
            known = parse_scheme(scheme)
            name, calibrates = known.class_at(bits), known.calibrates
    except SchemeError:  # of a test alone
        pass
    return Measurement(
        subject,
        scheme,
        spec,
        evidence,
        bits,
        1.0,
        seed,
        notes,
        bit_class=name,
        calibrates=calibrates,
    )


# --------------------------------------------------------------------------------------------------
# A machine and a corpus for measuring a tiny model.


MACHINE = Machine(torch.device("cpu"), torch.float32, stream_limit_nbytes=10**9)


def corpus() -> Corpus:
    windows = tuple(Window(k, np.arange(3, 20, dtype=np.int32) + k) for k in range(3))
    documents = tuple(EvaluationDocument(f"d{k}", f"{k}" * 64, 40) for k in range(3))
    return Corpus(Protocol(context=32), windows, windows, documents)
