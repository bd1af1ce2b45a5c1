"""Write docs/options.md: every command, every option, every key.

    make readme

The page is generated from the commands, so that it cannot differ from them.
"""

import inspect

import typer.main

from qaudit.cli.app import app
from qaudit.settings import settings_of
from tests.house.source import ROOT

PAGE = ROOT / "docs" / "options.md"
HEAD = """# Every command, option and key

<!-- written by `make readme` from the commands themselves: edit those -->

What few set has no option: `--set key=value`, repeatable, with the [keys](#keys) below, which are
keys of a recipe and arguments of `qaudit.scan(...)`, too; `qaudit list settings` prints all.
Options have keys as well: `--evaluation` is `evaluation`, `--soup` is `soups`. In the environment
an option or key is `QAUDIT_` and its name: `--out DIR` is `QAUDIT_OUT=DIR`, `context` is
`QAUDIT_CONTEXT`; the command line wins. Results go to stdout, everything else to stderr. Colour
is used only on a terminal, and not with `NO_COLOR`. Exit codes are in
[exit-codes.md](exit-codes.md). In parentheses is what holds where an option is not given.

Of Hugging Face's variables `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`
and `HF_HUB_DOWNLOAD_TIMEOUT` mean what they mean there. `QAUDIT_SIGNING_KEY` is the secret of
`sign` and `--signed`. `QAUDIT_CACHE` is the folder with answers of the Hub.
"""
KEYS = """
## Keys

`scan` takes all but those of rollouts and `threads`. `plan` takes `threads`, and neither `sign`
nor keys of the executor. `collect` and `import` take `sign`; `part`: `stream_memory`,
`disk_budget`, `verbose`; `series`: `last`, `limit`, `family`; `soup`:
`family`, `disk_budget`; `export`: those of its text, `dtype`, `disk_budget`.

"""
OF_THE_SHELL = {"help", "version", "install_completion", "show_completion"}


def commands(group=None, path=()):
    """Yield every command with the words that call it."""
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def page():
    """Return the whole page."""
    keys = (
        _item(f"`{name}`", _line(entry.help), entry.shown_default)
        for name, entry in settings_of().items()
        if not entry.option
    )
    sections = (_section(path, command) for path, command in commands())
    return "".join((HEAD, *sections, KEYS, *keys))


def _section(path, command):
    said = inspect.cleandoc(command.help or "").partition("Example: ")
    parts = [f"\n## qaudit {' '.join(path)}\n", said[0].strip() + "\n"]
    parts += [f"```console\n$ {said[2].strip()}\n```\n"] if said[2] else []
    takes = [p for p in command.params if p.param_type_name == "argument"]
    parts += ["".join(f"- `{_called(p)}`: {_line(p.help or '')}\n" for p in takes)] if takes else []
    rows, of_scan = _rows(command), _rows(dict(commands())[("scan",)])
    shared = [name for name, row in rows.items() if path != ("scan",) and of_scan.get(name) == row]
    rows = {name: row for name, row in rows.items() if name not in shared}
    parts += [f"As of `scan`: {', '.join(f'`{name}`' for name in shared)}.\n"] * bool(shared)
    if rows:
        parts.append("".join(rows.values()))
    return "\n".join(parts)


def _rows(command):
    """Return a row for each option, by its first name."""
    options = [p for p in command.params if p.param_type_name == "option"]
    return {p.opts[0]: _row(p) for p in options if p.name not in OF_THE_SHELL}


def _row(option):
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    default = option.show_default
    if not isinstance(default, str):
        default = str(option.default)
        if isinstance(option.default, bool) or option.default is None:
            default = "on" if option.default else "off" if option.is_flag else "none"
    return _item(names, _line(option.help or ""), default)


def _item(names, text, default):
    unset = "" if default in ("none", "off") else f" ({default})"
    return f"- {names}{unset}: {text.strip()}\n"


def _called(argument):
    return str(argument.metavar or argument.name.upper())


def _line(text):
    return " ".join(text.split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
