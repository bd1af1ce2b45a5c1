"""Write docs/options.md: every command, every option, its variable and its default.

    make readme

Generated whole from the commands themselves, so that it cannot say anything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer.main

from qaudit.cli.app import app
from tests.house.source import ROOT

PAGE = ROOT / "docs" / "options.md"
HEAD = """# Every command and every option

<!-- written by `make readme` from the commands themselves: edit those -->

Each option may stand in the environment under its variable; what is on the command line wins.
`-` in the last column: without the option nothing is asked of it, and the command decides by what
it finds. Exit codes are in [exit-codes.md](exit-codes.md). `NO_COLOR` is honoured, and colour is
only ever used on a terminal. Results go to stdout, everything else to stderr.

Of Hugging Face's variables `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`
and `HF_HUB_DOWNLOAD_TIMEOUT` mean what they mean there; `QAUDIT_CACHE` is the folder in which what
the Hub told is kept.
"""
OF_THE_SHELL = {"help", "version", "install_completion", "show_completion"}


def commands(
    group: Any = None, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with the words that call it."""
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def page() -> str:
    """Return the whole page."""
    return HEAD + "".join(_section(path, command) for path, command in commands())


def _section(path: tuple[str, ...], command: Any) -> str:
    said = inspect.cleandoc(command.help or "").partition("Example: ")
    parts = [f"\n## qaudit {' '.join(path)}\n", said[0].strip() + "\n"]
    parts += [f"```console\n$ {said[2].strip()}\n```\n"] if said[2] else []
    takes = [p for p in command.params if p.param_type_name == "argument"]
    parts += ["".join(f"- `{_called(p)}`: {_cell(p.help or '')}\n" for p in takes)] if takes else []
    options = [p for p in command.params if p.param_type_name == "option"]
    rows = [_row(p) for p in options if p.name not in OF_THE_SHELL]
    if rows:
        head = "| option | variable | what it does | default |\n| --- | --- | --- | --- |\n"
        parts.append(head + "".join(rows))
    return "\n".join(parts)


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    default = option.default
    unset = default is None or default is False or not isinstance(default, str | int | float)
    shown = "-" if unset else f"`{default}`"
    return f"| {names} | `{option.envvar}` | {_cell(option.help or '')} | {shown} |\n"


def _called(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
