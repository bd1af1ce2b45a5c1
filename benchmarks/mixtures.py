"""Mixtures of bits beside one width of as many stored bits: loss, divergence, and what they cost.

    python -m benchmarks.mixtures [MODEL] [--documents 100] [--out FOLDER]

One scan of a checkpoint, by default the last of the demo, on the text that a scan takes by default.
Each mixture is compared with the width that stores as many bits, paired by document: what it adds
to the loss less what the width adds, and the same of the divergence, at 95 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import qaudit
import qaudit.demo
from qaudit.core import statistics
from qaudit.core.registry import parse_scheme
from qaudit.judge.table import divergences, interval_of, losses

DEMO = Path(qaudit.demo.__path__[0])
DOCUMENT_TOKENS = 256  # whole documents of the default text took most of an hour
UNIFORM = {
    3.25: "gptq-3bit:group=64",
    3.5: "gptq-3bit:group=32",
    4.25: "gptq-4bit:group=64",
}
MEMBERS = {3.25: ":members=234568"}  # of three bits and more, 3.25 is all three


def mixtures(budget: float) -> list[str]:
    plain = f"gptq-mix:budget={budget}:group=64{MEMBERS.get(budget, '')}"
    return [parse_scheme(text).short for text in (plain, f"{plain}:tie=none")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=str(DEMO / "stage2-ingredient1-step1000"))
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("qaudit-out/mixtures"))
    options = parser.parse_args()
    audit = qaudit.scan(
        options.model,
        schemes=[*UNIFORM.values(), *(text for budget in UNIFORM for text in mixtures(budget))],
        evaluation_documents=options.documents,
        document_tokens=DOCUMENT_TOKENS,
        arithmetic=False,
        out=options.out,
    )
    print_paired(
        audit, [(parse_scheme(text).short, mixtures(budget)) for budget, text in UNIFORM.items()]
    )


def print_paired(audit: qaudit.Audit, compared: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Print schemes beside the one that each of them is compared with."""
    table = audit.evidence.table
    rows = {row.scheme: row for row in audit.record.measurements}
    subject = audit.record.subjects[0].label
    print("| scheme | bits | added loss, % | KL | less loss | less KL | seconds |")
    for first, others in compared:
        for name in (first, *others):
            row = rows[name]
            assert row.relative_error is not None and row.kl is not None
            cells = [
                f"`{name}`",
                f"{row.bits_per_weight:.3f}",
                f"{100 * row.relative_error.estimate:.2f}",
                f"{row.kl.estimate:.4f}",
            ]
            for sums in (losses, divergences):
                pair = [(subject, name), (subject, first)]
                change = interval_of(table, pair, statistics.change, sums=sums)
                cells.append(
                    f"{change.estimate:+.4f} [{change.low:+.4f}, {change.high:+.4f}]"
                    if change is not None and name != first
                    else ""
                )
            print(f"| {' | '.join(cells)} | {row.seconds:.0f} |")


if __name__ == "__main__":
    main()
