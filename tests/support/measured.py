"""Measurements that no model gave, with the class that their scheme has; a machine and a corpus."""

import hashlib
from contextlib import suppress

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

MACHINE = Machine(torch.device("cpu"), torch.float32, stream_limit_nbytes=10**9)


def measurement(subject, scheme, spec, evidence, bits, seed=0, notes=()):
    more = {"bit_class": str(int(bits)), "calibrates": False}
    with suppress(SchemeError):  # of a test alone
        if scheme == FULL_PRECISION:
            more["bit_class"] = FULL_PRECISION
        else:
            known = parse_scheme(scheme)
            more = {"bit_class": known.class_at(bits), "calibrates": known.calibrates}
    return Measurement(subject, scheme, spec, evidence, bits, 1.0, seed, notes, **more)


def drawn(subject, scheme, spec, nll, tokens, bits, notes=()):
    """Return a measurement of documents that have a number instead of a text."""
    shas = tuple(hashlib.sha256(f"document {k}".encode()).hexdigest() for k in range(len(tokens)))
    evidence = Evidence(shas, nll, tokens, tokens * 4)
    return measurement(subject, scheme, spec, evidence, bits, notes=notes)


def corpus():
    """Return the text of a tiny model."""
    windows = tuple(Window(k, np.arange(3, 20, dtype=np.int32) + k) for k in range(3))
    documents = tuple(EvaluationDocument(f"d{k}", f"{k}" * 64, 40) for k in range(3))
    return Corpus(Protocol(context=32), windows, windows, documents)
