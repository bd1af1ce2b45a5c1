"""The process in which a tokenizer of others is built and tried; started by path, with its file.

Its patterns may take a time that doubles with each character, and its replacements a memory that
each multiplies. The process is bounded, and prints why the tokenizer is refused.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

NBYTES_MEMORY, SECONDS = 1 << 32, 20
MOST_GROWTH = 1000
"""Characters that replacements may make of one; those of models make three."""

_PROSE = (
    "The quick brown fox jumps over 13 lazy dogs, 2,024 times; isn't it odd? "
    "def f(x):\n    return x * 1.5e-3  # ok\n\n\tZw\u00f6lf gro\u00dfe \u00c4pfel \u4f60\u597d "
)
_PROBES = (_PROSE * 20, *(c * 60 + "\n" for c in "ae 1.\n_-"), "aA" * 40 + "!", " a" * 40 + "!")


def main() -> None:
    for kind, most in ((resource.RLIMIT_AS, NBYTES_MEMORY), (resource.RLIMIT_CPU, SECONDS)):
        with suppress(OSError, ValueError):  # macOS has no limit of address space
            resource.setrlimit(kind, (most, most))
    path = Path(sys.argv[1])
    steps = list(_steps(json.loads(path.read_bytes())))
    growth, patterns = 1, []
    for step in steps:
        growth *= max(1, len(str(step.get("content", ""))))
        pattern = step.get("pattern")
        patterns += [text for text in (pattern or {}).values() if isinstance(text, str)]
    if growth > MOST_GROWTH:
        _refuse(f"its replacements make up to {growth:,} characters of one")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    try:
        for text in (*_PROBES, *patterns):
            tokenizer.encode(text)
    except Exception:  # noqa: BLE001 - of one that lacks a token, the run says so
        return
    except BaseException:  # noqa: BLE001 - a panic of the library, which would end a scan
        _refuse("its patterns fail on a page of text")


def _refuse(why: str) -> NoReturn:
    print(why)  # noqa: T201 - the answer
    sys.exit(3)


def _steps(table: Any) -> Iterator[dict[str, Any]]:
    waiting = [table.get(key) for key in ("normalizer", "pre_tokenizer")]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            waiting += step.get("normalizers") or []
            waiting += step.get("pretokenizers") or []
            if isinstance(step.get("pattern"), dict):
                yield step


if __name__ == "__main__":
    main()
