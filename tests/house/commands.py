"""Write docs/options.md: every command, every option, its variable and its default.

    make readme

The page is generated from the commands, so that it cannot differ from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer.main

from qaudit.cli.app import app
from qaudit.cli.help import shown_default
from tests.house.source import ROOT

PAGE = ROOT / "docs" / "options.md"
HEAD = """# Every command and every option

<!-- written by `make readme` from the commands themselves: edit those -->

Every option can also be set in the environment under its variable; the command line wins. Results
go to stdout, everything else to stderr. Colour is used only on a terminal, and not with `NO_COLOR`.
Exit codes are in [exit-codes.md](exit-codes.md). Options of `scan` are also keys of a recipe and
arguments of `qaudit.scan(...)`: `--calibration-documents` is `calibration_documents`, `--soup` is
`soups`, `--stage` is `stages`, `--diagnose` is `diagnostics`.

Of Hugging Face's variables `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`
and `HF_HUB_DOWNLOAD_TIMEOUT` mean what they mean there. `QAUDIT_SIGNING_KEY` is the
secret of `--sign` and `--signed`. `QAUDIT_CACHE` is the folder with answers
of the Hub.
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
    cells = (names, f"`{option.envvar}`", _cell(option.help or ""), shown_default(option))
    return f"| {' | '.join(cells)} |\n"


def _called(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
