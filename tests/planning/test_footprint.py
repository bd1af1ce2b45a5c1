"""What rounds of items take of the disk: refused where it is short, and never more than planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Shipped
from qaudit.errors import MachineError
from qaudit.planning import machine as module
from qaudit.planning.machine import Footprint
from qaudit.planning.sizes import Load, Sizes, TextSize
from qaudit.settings import DEFAULT_SCHEMES
from tests.support.models import save_model, text, write_documents
from tests.support.toys import tokenizer

GB = 10**9
LONG_SCHEMES = ("rtn-4bit", "gptq-4bit", "awq-4bit")


class Planned(Footprint):
    """A pass that takes so much of the disk."""

    rounds, weights_nbytes, spilled_nbytes = 21, 25 * GB, 40 * GB  # type: ignore[assignment]


ITEMS = TextSize(0, 0, 0, items=(("task", 10_042),))
PLANNED = Planned(Sizes(0, 0, 0, 0, 0, 0, 0), Load((), ITEMS, 1), 2, GB)
STREAM_NBYTES = 10 * 10**6


DEMO = Sizes(1_050_000, 4, 197_000, 262_000, 128, 384, 2048)
LONG = Sizes(2_100_000, 2, 737_000, 525_000, 256, 704, 2048)
OF_15M = Sizes(15_200_000, 6, 995_000, 9_216_000, 288, 768, 32_000)
OF_135M = Sizes(8_260_416, 2, 3_540_096, 1_180_224, 576, 1536, 2048)
MIXED = Sizes(24_610_000, 30, 802_816, 524_544, 256, 704, 2048)
MEASURED = [
    # sizes, schemes, tokens to calibrate on and to evaluate, a window: peak in MB above the
    # libraries in float32 (benchmarks/README.md, Memory)
    (DEMO, DEFAULT_SCHEMES, 4_096, 4_096, 512, 262),
    (OF_15M, DEFAULT_SCHEMES, 4_096, 4_096, 512, 680),
    (LONG, LONG_SCHEMES, 32_768, 26_611, 2048, 1_201),
    (OF_135M, ("gptq-4bit",), 32_768, 8_188, 2048, 1_852),
    (MIXED, ("gptq-mix:budget=3.5",), 16_384, 16_352, 512, 974),
]


def test_memory_that_is_planned_is_near_what_was_measured() -> None:
    for sizes, schemes, calibration, evaluation, context, measured in MEASURED:
        load = Load.of(parse_schemes(schemes), TextSize(calibration, evaluation, context))
        planned = Footprint(sizes, load, 4, 6 * GB).memory_nbytes / 1e6
        assert measured / 1.2 <= planned <= measured * 1.5


def test_what_batches_leave_inside_a_block_is_planned_while_blocks_are_of_the_heap() -> None:
    sizes = LONG

    def of_a_token(sizes: Sizes, scheme: str, limit: int, itemsize: int = 4) -> float:
        loads = (Load.of(parse_schemes([scheme]), TextSize(n, 0, 64)) for n in (10_000, 20_000))
        fewer, more = (Footprint(sizes, load, itemsize, limit).memory_nbytes for load in loads)
        return (more - fewer) / itemsize / 10_000

    streams = 2 * sizes.hidden
    waits, made = 5 * sizes.hidden + sizes.widest, 3 * sizes.widest
    assert of_a_token(sizes, "gptq-4bit", 10 * GB) == streams + waits + made
    assert of_a_token(sizes, "rtn-4bit", 10 * GB) == sizes.hidden
    large = replace(sizes, widest=4_096)  # a batch in its widest linear has 64 MiB, then 32
    for itemsize in (4, 2):
        expected = streams + 5 * sizes.hidden + large.widest
        assert of_a_token(large, "gptq-4bit", 10 * GB, itemsize) == expected


def test_what_waits_beside_hidden_states_is_in_each_stream_and_what_is_given_in_each_model():
    file = Shipped(file="file", format="gptq", bits=4, sha256="0" * 64)
    load = Load.of((*parse_schemes(["gptq-4bit"]), file), TextSize(100, 1_000, 512))
    plain, beside, given = (
        Footprint(replace(DEMO, **more), load, 2, GB).streams_nbytes
        for more in ({}, {"beside": 3}, {"given": 5})
    )
    assert beside - plain == 2 * 3 * ((3 + 1) * 1_000 + (1 + 1) * 100)
    assert given - plain == 2 * 5 * 2 * (1_000 + 100)  # of the subject, and of the file


OUT, TEMPORARY = Path("out"), Path("temporary")
FEWER = "--set task_items=478"


def test_a_disk_too_small_is_refused_with_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hub_cache", lambda: Path("cache"))
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: "temporary")
    short: tuple[tuple[dict[Path, int], int, int, str, tuple[str, ...]], ...] = (
        ({OUT: 25, TEMPORARY: 40}, 100, 21, "", ()),
        ({OUT: 24, TEMPORARY: 40}, 0, 21, "up to 25.0 GB of disk in `out` .* 24.0 GB", (FEWER,)),
        ({OUT: 25, TEMPORARY: 30}, 0, 21, "in `temporary`",
         ("--set stream_memory=11GB` or with", FEWER, "`TMPDIR`")),
        ({OUT: 25, TEMPORARY: 30}, 0, 1, "in `temporary`", ("stream_memory", "`TMPDIR`")),
        ({OUT: 70}, 5, 21, "", ()),  # one disk, which downloads come off
        ({OUT: 70}, 6, 21, "64.0 GB are free", (FEWER,)),
    )  # fmt: skip
    for disks, downloads, rounds, message, ways in short:
        free = {folder: count * GB for folder, count in disks.items()}
        alone = len(disks) == 1
        monkeypatch.setattr(module, "free_disk_nbytes", free.__getitem__)
        monkeypatch.setattr(module, "shares_disk", lambda a, b, alone=alone: a == b or alone)
        monkeypatch.setattr(Planned, "rounds", rounds)
        with pytest.raises(MachineError, match=message) if message else nullcontext() as refused:
            PLANNED.refuse_short_disk(OUT, downloads * GB)
        if refused is not None:
            assert all(way in refused.value.hint for way in ways)
            assert ("task_items" in refused.value.hint) == (FEWER in ways)


_SCAN = """
import json, os, sys, threading, time
from pathlib import Path
from qaudit.engine.hidden_states import HiddenStates
import qaudit.engine.measure as rounds
import qaudit.planning.sizes as cost
import qaudit.planning.machine as footprint
import qaudit.text.texts as texts
from dataclasses import replace
from qaudit.cli import main

cost.ROUND_TOKENS = footprint.ROUND_TOKENS = rounds.ROUND_TOKENS = 6_000
build = texts.item_text

def several_tasks(*arguments):
    text = build(*arguments)
    items = (replace(item, task=f"task-{k // 20}") for k, item in enumerate(text.items))
    return replace(text, items=tuple(items))

texts.item_text = several_tasks
most = 0
files = {}

def look(path, nbytes):
    global most
    files[path] = max(nbytes, files.get(path, 0))
    there = [Path(one) for one in files]
    weights = sum(one.stat().st_size for one in Path().rglob("weights/*/*.safetensors"))
    most = max(most, weights + sum(files[str(one)] for one in there if one.exists()))

spill = HiddenStates._put

def watched(self, stream, batch, hidden_BTD):
    spill(self, stream, batch, hidden_BTD)
    if (stream, batch) in self._files:
        look(str(self._files[stream, batch].path), hidden_BTD.nbytes)

HiddenStates._put = watched
try:
    code = main()
except SystemExit as ended:
    code = ended.code
Path("most.json").write_text(json.dumps([code, most]))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("family", "changes", "count"),
    [("llama", {}, 170), ("mistral", {"sliding_window": 64}, 50)],  # with trees and without
)
def test_rounds_take_no_more_memory_and_disk_than_the_plan_says(
    family: str, changes: dict[str, Any], count: int, tmp_path: Path
) -> None:
    _prepare(tmp_path, family, **changes)
    many, most = _scanned(tmp_path, count)
    (rounds,) = [note for note in many["plan"]["notes"] if "rounds of" in note]
    assert int(rounds.split("about ")[1].split()[0]) >= 3  # 1 by what trees would feed
    assert many["plan"]["nbytes_disk"] / 4 < most <= many["plan"]["nbytes_disk"]
    if count == 170:
        few, _ = _scanned(tmp_path, 2)
        # Libraries that load while a scan runs take as much as such a model: both have them.
        used = many["environment"]["used"] - few["environment"]["used"]
        every_state = 5 * 170 * 128 * 256 * 4
        assert used <= many["plan"]["nbytes_memory"] < every_state


def _prepare(root: Path, family: str, **changes: object) -> None:
    shape = {"hidden_size": 256, "max_position_embeddings": 1024}
    save_model(root / "model", 1, family, **shape, **changes)
    tokenizer(adds_bos=False).save_pretrained(root / "model")
    write_documents(root / "calibration.jsonl", range(100, 104))
    write_documents(root / "evaluation.jsonl", range(200, 212))


def _scanned(root: Path, count: int) -> tuple[dict[str, Any], int]:
    """Scan so many items in a process; return the audit, and the most bytes on the disk at once."""
    options = {"options": ["a", "key", "path"], "answer": 0}
    lines = [{"context": f"{k} {text(k, 120)}", **options} for k in range(count)]
    (root / "items.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = (
        f"scan model --calibration calibration.jsonl --evaluation evaluation.jsonl --out {count} "
        "--set choices=items.jsonl --schemes rtn-4bit,gptq-4bit,awq-4bit "
        f"--set dtype=float32 -q --set stream_memory={STREAM_NBYTES}B"
    )
    done = subprocess.run(
        [sys.executable, "-c", _SCAN, *arguments.split()],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (root / "most.json").exists(), done.stderr
    code, most = json.loads((root / "most.json").read_text())
    assert code == 0, done.stderr
    audit = json.loads((root / str(count) / "audit.json").read_text())
    environment = audit["environment"]
    used = environment["memory_peak_nbytes"] - environment["memory_baseline_nbytes"]
    environment["used"] = used
    return audit, most
