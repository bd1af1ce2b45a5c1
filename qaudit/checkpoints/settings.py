"""The small files beside weights that decide numbers: hashed into the plan, checked where read.

The configuration decides the arithmetic, the tokenizer the tokens, an index which tensors are
read, and a quantization configuration how codes are decoded. Which of them a folder has is pinned
too: an `added_tokens.json` that was not there when the plan was made changes the tokens.
`generation_config.json` decides nothing that is measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from qaudit.checkpoints.stamps import hash_of
from qaudit.types import WeightFile
from qaudit.whole import read_regular

CONFIGURATION = "config.json"
QUANTIZATION = ("quantize_config.json", "quant_config.json")  # of older quantized repositories
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",  # sentencepiece
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
LARGEST_SETTINGS_NBYTES = 100_000_000
"""A larger file is no setting, whatever its name."""

_PINNED = (CONFIGURATION, *QUANTIZATION, *INDEXES, *TOKENIZER)


def settings_in(folder: Path) -> tuple[WeightFile, ...]:
    """Return the small files of a folder with their hashes; one that cannot be read is left out."""
    pinned = []
    for path in sorted(_paths(folder)):
        with suppress(OSError):
            nbytes = path.stat().st_size
            if path.is_file() and nbytes < LARGEST_SETTINGS_NBYTES:
                name = path.relative_to(folder).as_posix()
                pinned.append(WeightFile(name, nbytes, hash_of(path)))
    return tuple(pinned)


def _paths(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (p for p in folder.iterdir() if any(fnmatchcase(p.name, n) for n in _PINNED))
    yield from folder.glob("additional_chat_templates/*.jinja")
    if _names_code(folder / CONFIGURATION) or _names_code(folder / "tokenizer_config.json"):
        yield from folder.rglob("*.py")


def _names_code(path: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError):
        if path.is_file() and path.stat().st_size < LARGEST_SETTINGS_NBYTES:
            return "auto_map" in json.loads(read_regular(path).decode())
    return False
