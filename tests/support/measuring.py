"""A machine and a corpus for measuring a tiny model."""

from __future__ import annotations

import numpy as np
import torch

from qaudit.engine.tasks import Machine
from qaudit.types import Corpus, EvaluationDocument, Protocol, Window

MACHINE = Machine(torch.device("cpu"), torch.float32, stream_limit_nbytes=10**9)


def corpus() -> Corpus:
    windows = tuple(Window(k, np.arange(3, 20, dtype=np.int32) + k) for k in range(3))
    documents = tuple(EvaluationDocument(f"d{k}", f"{k}" * 64, 40) for k in range(3))
    return Corpus(Protocol(context=32, stride=32), windows, windows, documents)
