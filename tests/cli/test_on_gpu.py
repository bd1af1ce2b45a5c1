"""The command on a pretended GPU: files as they ship and diagnostics have the CPU's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import Run, audit_of
from tests.support.curved import must_be_close
from tests.support.pretended_device import pretended
from tests.support.quantized import quantized_copy

BASE = "series/step10"
ROUNDING = 1e-5  # the head takes other numbers of rows at once on a GPU


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        ("--shipped", "model-GPTQ", "--shipped", "model-AWQ"),
        (
            "--set",
            "diagnostics=weights",
            "--set",
            "diagnostics=sensitivity:layers=1:scheme=rtn-3bit",
        ),
    ],
    ids=["files", "diagnostics"],
)
def test_a_scan_has_the_cpus_numbers(chosen: tuple[str, ...], place: Path, scan: Run) -> None:
    quantized_copy(place / BASE, place / "model-GPTQ", "gptq")
    quantized_copy(place / BASE, place / "model-AWQ", "awq", scale=2.0)
    chosen = (BASE, *chosen, "--schemes", "gptq-3bit", "--set", "dtype=float32")
    assert scan(*chosen, "--device", "cpu", "--out", "cpu").code == 0
    with pretended() as device:
        done = scan(*chosen, "--device", "cuda", "--out", "gpu")
    assert done.code == 0, done.err
    cpu, gpu = audit_of(place / "cpu"), audit_of(place / "gpu")
    assert device.tried > 1000
    assert gpu["environment"]["device"] == "pretended"
    for part in ("measurements", "comparisons", "diagnostics"):
        must_be_close(gpu[part], cpu[part], ROUNDING)
