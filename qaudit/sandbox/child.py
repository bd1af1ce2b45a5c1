"""The process in which templates of others are rendered; started by path, with limits as JSON.

A request is a length and a pickle of a template, its values, and whether it is a chat template. An
answer is 0 or 1 for a refusal, a length, and text: of a chat a JSON list of what was rendered and
of the places between `{% generation %}` and `{% endgeneration %}`.
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
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import StrictUndefined, TemplateError, nodes, pass_eval_context
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

TODAY = datetime(2024, 7, 26)  # for templates that print it: Llama's own default


def main() -> None:
    """Answer requests until there are no more; memory and time are limited, no file is written."""
    limits = json.loads(sys.argv[1])
    for kind, most in (
        (resource.RLIMIT_AS, limits["nbytes_memory"]),
        (resource.RLIMIT_CPU, limits["total_seconds"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(OSError, ValueError):  # macOS has no limit of address space
            resource.setrlimit(kind, (most, most))
    environment, chats = _environment(), _chat_environment()
    compiled = lru_cache(maxsize=4096)(environment.from_string)
    compiled_chat = lru_cache(maxsize=16)(chats.from_string)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(header := requests.read(4)) == 4:
        template, values, is_chat = pickle.loads(requests.read(struct.unpack(">I", header)[0]))
        signal.setitimer(signal.ITIMER_PROF, limits["seconds"])  # its signal ends the process
        parts = chats.rendered = []
        places = chats.generations = []
        try:
            make, length, refused = compiled_chat if is_chat else compiled, 0, False
            for part in make(template).generate(**values):
                parts.append(part)
                length += len(part)
                if length > limits["characters"]:
                    raise ValueError(f"it makes more than {limits['characters']:,} characters")
            text = "".join(parts)
            if is_chat:
                text = json.dumps([text, places], ensure_ascii=False)
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            text, refused = f"{type(error).__name__}: {error}"[:300], True
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = text.encode("utf-8", "surrogatepass")
        answers.write(struct.pack(">BI", refused, len(answer)) + answer)
        answers.flush()


def _draw_nothing(environment: Any) -> None:
    """Let what draws at random fail: two renderings may draw the same."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise TemplateError("`random` and `lipsum` make another text each time")

    environment.filters["random"] = environment.globals["lipsum"] = refuse


def _environment() -> Any:
    """Return Jinja as lm-eval sets it up, with nothing that reaches beyond the values."""
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True
    )
    _draw_nothing(environment)
    environment.filters["regex_replace"] = lambda string, pattern, repl, count=0: re.sub(
        pattern, repl, string, count=count
    )
    return environment


class _Generation(Extension):
    """Note where what `{% generation %}` holds is in the text, as transformers does."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja reads it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_noted"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _noted(self, context: Any, caller: Any) -> str:
        text: str = caller()
        environment: Any = self.environment
        first = sum(map(len, environment.rendered))
        environment.generations.append((first, first + len(text)))
        return text


def _chat_environment() -> Any:
    """Return Jinja as transformers sets it up for chat templates, on a day that never changes."""
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        layout: dict[str, Any] = {"indent": indent, "separators": separators}
        return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys, **layout)

    def fail(message: str) -> NoReturn:
        raise TemplateError(message)

    _draw_nothing(environment)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


if __name__ == "__main__":
    main()
