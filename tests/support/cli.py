"""What a test sees of a command, and the options of a scan that takes a second."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

STEPS = (10, 200, 1000)  # as text they sort otherwise
TEXT = ("--calibration", "calibration.jsonl", "--evaluation", "evaluation.jsonl")
ROUNDED = "rtn-4bit:group=32"
AUDITED = (
    "series", *TEXT, "--schemes", f"{ROUNDED},rtn-3bit:group=32", "--soup", "late=last:2",
    "--out", "out",
)  # fmt: skip
"""What the audit that tests share is a scan of."""
OUT = Path("out")
QUICK = (*TEXT, "--schemes", "rtn-4bit", "--out", "out")

# Commands one after another, each with its exit code in a line of its own on stderr.
SEVERAL = """
import sys
from qaudit.cli import main
for words in sys.argv[1:]:
    sys.argv = ["qaudit", *words.split()]
    try:
        main()
    except SystemExit as end:
        print(end.code, file=sys.stderr, flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    """What a person sees of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


def run_in(folder, *arguments, commands=None):
    """Run the command line in a folder without pictures, for audits that tests share."""
    from qaudit.cli import main
    from tests.support.saved_audits import stub_pictures

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("QAUDIT_CACHE", str(folder / "cache"))
        patch.setattr("qaudit.report.folder.write", stub_pictures)
        patch.setattr(sys, "argv", ["qaudit", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main(commands)
    return int(end.value.code or 0)


def refused(done, code, sentence, hint):
    """Assert that a command was refused in words: what is wrong, what to do, and the exit code."""
    assert done.err.count("error: ") == 1, done.err
    said, _, advice = done.err.partition("error: ")[2].partition("hint: ")
    assert sentence in said
    assert hint in advice
    assert done.code == code


def audit_of(folder=OUT):
    """Read the audit in an output folder."""
    return json.loads((folder / "audit.json").read_text(encoding="utf-8"))


def cells(folder=OUT, part="measurements"):
    """Return rows of the audit in an output folder, by subject and scheme."""
    return {(row["subject"], row["scheme"]): row for row in audit_of(folder)[part]}


def edited(file, change=lambda table: None, **values):
    """Change a JSON file by a function and by keys; return what it held."""
    text = file.read_text(encoding="utf-8")
    table = json.loads(text)
    change(table)
    file.write_text(json.dumps({**table, **values}), encoding="utf-8")
    return text


def flipped(file, at=-1):
    """Flip one bit of a file."""
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def settings(repo, **values):
    (repo / "repo.json").write_text(json.dumps(values), encoding="utf-8")


def weights_in(cache):
    return [path for path in cache.rglob("*.safetensors") if path.exists()]


OF_THE_RUN = ("seconds", "details", "path", "evidence", "evidence_sha256")


def flat(value, name=""):
    """Return values by their path, without what differs from run to run."""
    if isinstance(value, dict):
        kept = {str(k): v for k, v in value.items() if k not in OF_THE_RUN}
    elif isinstance(value, list):
        kept = {str(k): v for k, v in enumerate(value)}
    else:
        return {name: value}
    return {path: v for k, below in kept.items() for path, v in flat(below, f"{name}/{k}").items()}


def must_be_close(value, expected, tolerance):
    """Assert that floats are close and everything else is equal."""
    values, others = flat(value), flat(expected)
    assert values.keys() == others.keys()
    for name, other in others.items():
        if isinstance(other, float):
            assert math.isclose(values[name], other, rel_tol=tolerance, abs_tol=tolerance), name
        else:
            assert values[name] == other, name
