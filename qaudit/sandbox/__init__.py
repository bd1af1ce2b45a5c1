"""Templates of others, in a process that can be lost.

A Jinja template can reach every object of its process, loop for ever or fill the memory. So it is
rendered by `child.py`, under Jinja's immutable sandbox and the limits of the operating system: one
process for many renderings, at about 50 microseconds each. Values go there pickled, because they
are ours; only text comes back, because what sends it may be the template. A second process renders
the same: what differs was drawn, or names an address, and would be another text next time.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qaudit.errors import SourceError

_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
"""What Python needs to start; tokens and addresses stay here."""

_HINT = "leave it out, or simplify the template"


class TemplateError(SourceError):
    """A template does what none is allowed, or cannot be rendered."""


@dataclass(frozen=True)
class Limits:
    """What templates may take."""

    seconds: float = 2.0  # of the processor, for one text; an ordinary one takes 20 microseconds
    total_seconds: int = 600
    nbytes_memory: int = 1 << 29
    characters: int = 1_000_000  # of one text
    total_characters: int = 1 << 28
    nbytes_values: int = 1 << 25  # a template and its values


class Templates:
    """Renders templates of others; the process starts with the first one."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._characters = 0

    def __enter__(self) -> Templates:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what was not sent to a process that ended
                    pipe.close()  # type: ignore[union-attr]
            process.wait()

    def render_chat(
        self, template: str, values: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return a chat, and where `{% generation %}` is in it."""
        answer = self.render(template, values, is_chat=True)
        try:
            text, places = json.loads(answer)
            places = [(int(start), int(stop)) for start, stop in places]
            bounds = [bound for place in places for bound in place]
            is_inside = bounds == sorted(bounds) and all(0 <= b <= len(text) for b in bounds)
            if not isinstance(text, str) or not is_inside:
                raise ValueError("places outside of the text")
        except (ValueError, TypeError, RecursionError) as error:  # a template answered itself
            raise TemplateError(
                f"the template `{_short(template)}` fails: its answer is none", hint=_HINT
            ) from error
        return text, places

    def render(self, template: str, values: Mapping[str, Any], *, is_chat: bool = False) -> str:
        """Return a template with its values; TemplateError if it is not rendered."""
        try:
            request = pickle.dumps((template, dict(values), is_chat), protocol=5)
        except RecursionError as error:
            raise TemplateError("the values of a template nest without end", hint=_HINT) from error
        nbytes, most = len(request), self.limits.total_characters
        if nbytes > self.limits.nbytes_values:
            allowed = f"more than {self.limits.nbytes_values:,}"
            message = f"a template and its values have {nbytes:,} bytes, {allowed}"
            raise TemplateError(message, hint=_HINT)
        refused, text = self._exchange(request)
        why = text
        if not refused and self._exchange(request, place=1) != (refused, text):
            refused, why = True, "it makes another text each time"
        if refused:
            raise TemplateError(f"the template `{_short(template)}` fails: {why}", hint=_HINT)
        self._characters += len(text)
        if self._characters > most:
            raise TemplateError(f"templates make more than {most:,} characters", hint=_HINT)
        return text

    def _exchange(self, request: bytes, place: int = 0) -> tuple[bool, str]:
        """Send a request; return whether it was refused, and the text or the reason."""
        while len(self._processes) <= place:
            # Found as a file, so that the child imports nothing of this package, nor of the folder
            # that a user is in.
            child = Path(__file__).with_name("child.py")
            process = subprocess.Popen(
                [sys.executable, "-I", str(child), json.dumps(asdict(self.limits))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # an interrupt of the terminal is for us
            )
            self._processes.append(process)
        process = self._processes[place]
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(struct.pack(">I", len(request)) + request)
            process.stdin.flush()
            refused, length = struct.unpack(">BI", process.stdout.read(5))
            if length > 8 * self.limits.characters:
                raise EOFError
            return bool(refused), process.stdout.read(length).decode("utf-8", "surrogatepass")
        except (OSError, EOFError, struct.error, UnicodeDecodeError):  # the process ended
            process.kill()
            code = process.wait()
            self.close()
            if code in (-signal.SIGPROF, -signal.SIGXCPU):
                return True, f"it takes more than {self.limits.seconds:g} seconds"
            return True, f"the process that renders it ended with {code}"
        except BaseException:
            self.close()  # an interrupt between request and answer: the next answer would be wrong
            raise


def _short(template: str) -> str:
    line = " ".join(template.replace("`", "'").split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= 60 else f"{line[:57]}..."
