"""The process in which templates of others are rendered; started by path, with limits as JSON.

A request is a length and a pickle of a template and its values. An answer is 0 or 1 for a refusal,
a length, and text.
"""

from __future__ import annotations

import json
import pickle
import re
import resource
import signal
import struct
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment


def main() -> None:
    """Answer requests until there are no more."""
    limits = json.loads(sys.argv[1])
    _bound(limits)
    environment = _environment()
    compiled = lru_cache(maxsize=4096)(environment.from_string)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(header := requests.read(4)) == 4:
        template, values = pickle.loads(requests.read(struct.unpack(">I", header)[0]))
        signal.setitimer(signal.ITIMER_PROF, limits["seconds"])  # its signal ends the process
        try:
            text, refused = _rendered(compiled(template), values, limits["characters"]), False
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            text, refused = f"{type(error).__name__}: {error}"[:300], True
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = text.encode("utf-8", "surrogatepass")
        answers.write(struct.pack(">BI", refused, len(answer)) + answer)
        answers.flush()


def _rendered(template: Any, values: dict[str, Any], most: int) -> str:
    parts, length = [], 0
    for part in template.generate(**values):
        parts.append(part)
        length += len(part)
        if length > most:
            raise ValueError(f"it makes more than {most:,} characters")
    return "".join(parts)


def _environment() -> Any:
    """Return Jinja as lm-eval sets it up, with nothing that reaches beyond the values."""
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["regex_replace"] = lambda string, pattern, repl, count=0: re.sub(
        pattern, repl, string, count=count
    )
    return environment


def _bound(limits: dict[str, Any]) -> None:
    """Limit memory and time; no file can be written."""
    for kind, most in (
        (resource.RLIMIT_AS, limits["nbytes_memory"]),
        (resource.RLIMIT_CPU, limits["total_seconds"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(OSError, ValueError):  # macOS has no limit of address space
            resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    main()
