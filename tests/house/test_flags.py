"""The flags of every command are a promise: none goes, and a new one is written down here."""

from __future__ import annotations

from tests.house.commands import commands
from tests.house.source import ROOT

LIST = ROOT / "tests" / "house" / "flags.txt"


def flags() -> str:
    """Return every option and argument, one command a line."""
    lines = []
    for path, command in commands():
        names = [name for p in command.params for name in (*p.opts, *p.secondary_opts)]
        lines.append(f"{' '.join(path)}: {' '.join(names)}")
    return "\n".join(lines) + "\n"


def test_the_flags_are_those_in_the_list() -> None:
    assert flags() == LIST.read_text(encoding="utf-8")
