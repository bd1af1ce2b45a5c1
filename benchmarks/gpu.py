"""What an audit takes on a CUDA device: memory against the plan, copies beside kernels, a peer.

    python -m benchmarks.gpu [--shape 7B] [--out benchmarks/gpu.txt]

Two blocks with the shape of a 7B, random weights in bfloat16, hidden states on the host: fp and the
eight default schemes side by side. Memory is what torch's allocator held at its peak. Of copies
between the host and the device, as a trace of torch's profiler lists them, the share of their time
is printed in which a kernel runs. The peer is llm-compressor, as in `python -m benchmarks.audit`,
in seconds of a clock: `.peers/llmcompressor` has to have a torch that sees the device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import audit
from benchmarks.clock import DEVICE_VARIABLE, PEER_PYTHON
from benchmarks.models import CONTEXT, SHAPES, Shape, make_model, read_tokens
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_schemes
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.tokens import Feed
from qaudit.model.blocks import BlockModel
from qaudit.planning.machine import Footprint, choose_column_loop
from qaudit.planning.sizes import Load, TextSize
from qaudit.settings import DEFAULT_SCHEMES
from qaudit.support.sizes import size
from qaudit.types import Window
from tests.support.tiny import header_sizes

COPIES = ("HtoD", "DtoH")
Span = tuple[float, float]


@dataclass(frozen=True)
class Memory:
    planned_nbytes: int
    held_nbytes: int


@dataclass(frozen=True)
class Overlap:
    """Microseconds of copies between host and device, and of those beside a kernel."""

    copying: float
    beside: float

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Overlap:
        """Read the events of a trace."""
        kernels, copies = list[Span](), list[Span]()
        for event in events:
            if event.get("cat") == "kernel":
                kernels.append((event["ts"], event["ts"] + event["dur"]))
            elif event.get("cat") == "gpu_memcpy" and any(c in event["name"] for c in COPIES):
                copies.append((event["ts"], event["ts"] + event["dur"]))
        kernels = _merged(kernels)
        beside = sum(_shared(copy, kernels) for copy in copies)
        return cls(sum(end - start for start, end in copies), beside)


def _merged(spans: list[Span]) -> list[Span]:
    """Join spans that overlap."""
    merged = list[Span]()
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _shared(span: Span, spans: Sequence[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in spans)


def run_pass(folder: Path, device: torch.device) -> None:
    """Send fp and the default schemes through a model, with hidden states on the host."""
    schemes = parse_schemes(DEFAULT_SCHEMES)
    calibration, evaluation = (
        make_batches([Window(k, row) for k, row in enumerate(rows)], CONTEXT)
        for rows in read_tokens(folder)
    )
    loop, _ = choose_column_loop(str(device), schemes, header_sizes(folder))
    model = BlockModel(folder, WeightFolder(folder), dtype=torch.bfloat16, device=device)
    with HiddenStates(folder / "spill", 2**36, device) as states:
        run_blocks(model, Feed(calibration, evaluation, column_loop=loop), schemes, states)


def memory(folder: Path, device: torch.device, windows: int) -> Memory:
    """Return what a pass was planned to hold on the device, and what it held."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_pass(folder, device)
    tokens = windows * CONTEXT
    load = Load.of(parse_schemes(DEFAULT_SCHEMES), TextSize(tokens, tokens, CONTEXT))
    planned = Footprint(header_sizes(folder), load, 2, 0, "cuda").memory_nbytes
    return Memory(planned, int(torch.cuda.max_memory_allocated(device)))


def overlap(folder: Path, device: torch.device) -> Overlap:
    """Trace a pass."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run_pass(folder, device)
        torch.cuda.synchronize(device)
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    return Overlap.of(json.loads(trace.read_text())["traceEvents"])


def lines(memory: Memory, overlap: Overlap, seconds: float) -> Iterable[str]:
    """Yield what is measured here, a line for each figure."""
    share = memory.held_nbytes / memory.planned_nbytes
    yield f"memory: {size(memory.held_nbytes)} held, {share:.2f} of the plan (goal 0.67 to 1.5)"
    if overlap.copying:
        beside = overlap.beside / overlap.copying
        yield f"copies: {overlap.copying / 1e6:.2f} s, {beside:.0%} of it beside a kernel"
    else:
        yield "copies: none in the trace"
    yield f"a pass: {seconds:.1f} s"


def against_peer(folder: Path, shape: Shape) -> str:
    """Return the ratios of an audit to the runs of llm-compressor that it replaces."""
    if not PEER_PYTHON.exists():
        return "llm-compressor: - (make .peers/llmcompressor/.done installs it)"
    os.environ[DEVICE_VARIABLE] = "cuda"
    best = audit.Seconds()
    try:
        audit.run_round(best, folder, shape, (4, 4))
    except SystemExit as error:
        return f"llm-compressor: - ({str(error).splitlines()[-1][:200]})"
    ratios = ", ".join(f"{name} {value:.2f}" for name, value in audit.ratios(best).items())
    return f"against llm-compressor: {ratios}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--shape", default="7B", choices=SHAPES)
    options.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".txt"))
    chosen = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: this measures a CUDA device and there is none\nhint: run it where one is")
    device, shape = torch.device("cuda"), SHAPES[chosen.shape]
    written = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, `{chosen.shape}`"]
    with TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder, shape, "bfloat16")
        run_pass(folder, device)  # kernels are compiled and chosen
        began = time.perf_counter()
        held = memory(folder, device, shape.windows)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
        written += lines(held, overlap(folder, device), seconds)
        torch.cuda.empty_cache()
        written.append(against_peer(folder, shape))
    text = "\n".join(written)
    print(text)
    chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
