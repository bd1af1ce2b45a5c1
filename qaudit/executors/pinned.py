"""Pin a plan, so that several processes can measure parts of it."""

from __future__ import annotations

from qaudit.executors.ready import read_text
from qaudit.planning.pins import NUMERICS, default_threads, pinned_libraries
from qaudit.planning.prepare import Prepared
from qaudit.saved.parts import write_run
from qaudit.saved.writer import one_writer
from qaudit.types import Pins, Run


def pin(prepared: Prepared, threads: int | None = None) -> Run:
    """Write what every process that measures a part of the plan must agree on."""
    plan, options = prepared.plan, prepared.options
    versions = pinned_libraries()
    corpus = read_text(plan, options, prepared.hub)
    pins = Pins(
        threads=threads or default_threads(),
        libraries=versions,
        numerics=NUMERICS,
        text_sha256=tuple(draw.sha256 for draw in corpus.draws),
        items_sha256=dict(corpus.items_sha256),
        self_check=options.self_check,
        cross_check=options.cross_check,
    )
    pinned = Run(plan, pins)
    with one_writer(prepared.out):
        prepared.write_lock(always=True)
        return write_run(pinned, prepared.out)
