"""The seal of a file of results: the sha256 of all else in it, written into the file itself.

It finds damage and careless edits wherever the file is copied to. It does not find forgery: an
editor can renew it. What does is a signature (`signature.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qaudit.types import digest
from qaudit.whole import read_regular, write_whole

SEAL = "sha256"
_LARGEST_NBYTES = 2**28


def seal_of(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Return the seal of columns, and of the text that names what they are of."""
    columns = {
        name: [array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
        for name, array in arrays.items()
    }
    return digest([dict(about), columns])


def write_sealed(path: Path, text: str) -> None:
    document = json.loads(text)
    write_whole(path, json.dumps({**document, SEAL: digest(document)}, indent=1) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """Return a sealed document; ValueError or OSError if it is not as it was written."""
    document = json.loads(read_regular(path, _LARGEST_NBYTES))
    if not isinstance(document, dict) or document.pop(SEAL, None) != digest(document):
        raise ValueError("it is not as it was written")
    return document
