"""How many kernels a block of a 7B model starts under each scheme, and where the host waits.

    python -m benchmarks.launches [SCHEMES ...]

Operators are counted that compute on a pretended GPU (tests/support/pretended_device.py), with the
columns and groups of OLMo-2-7B. Rows are a 64th, and with them what is processed at a time; large
products are not computed. An operator counts as one kernel, a sort too; the fused kernel as one.
Last: the launches of the default audit, at 5 microseconds each, against the forward passes of its
131,072 tokens of evaluation at 500 TFLOP/s, which is its floor.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qaudit.core import column_loops, gguf, gptq_solver, grid
from qaudit.core.linears import Inputs, Linears
from qaudit.core.registry import parse_scheme
from qaudit.core.schemes import awq
from qaudit.settings import DEFAULT_SCHEMES
from tests.support.pretended_device import ACTIVE, pretended

SHARE = 64
HIDDEN, INNER, BLOCKS = 4096, 11008, 32
GROUPS = (  # linears that read the same input: their rows, and columns
    ({"q_proj": HIDDEN, "k_proj": HIDDEN, "v_proj": HIDDEN}, HIDDEN),
    ({"o_proj": HIDDEN}, HIDDEN),
    ({"gate_proj": INNER, "up_proj": INNER}, HIDDEN),
    ({"down_proj": HIDDEN}, INNER),
)
EIGHTH = (  # of the columns
    ({"q_proj": 512, "k_proj": 512, "v_proj": 512}, 512),
    ({"o_proj": 512}, 512),
    ({"gate_proj": 1376, "up_proj": 1376}, 512),
    ({"down_proj": 512}, 1376),
)
OTHERS = (  # that no default set has
    "hqq-4bit", "quik-4bit", "quarot-rtn-4bit", "quarot-4bit", "atom-4bit", "gguf-q3_k",
    "gguf-q4_k", "gguf-q6_k", "duquant-4bit",
)  # fmt: skip
LEARNED = ("flatquant-4bit", "spinquant-4bit", "ostquant-4bit")
TOKENS, RATE, LAUNCH = 131_072, 5e14, 5e-6
FORWARD = 1_800  # launches of a stream's tokens through a block, counted on the whole engine
_LARGE = 2**28  # operations of a product that is left out
_FREE = ("empty", "detach", "_local_scalar_dense", "lift_fresh", "is_", "equal", "alias")


class Launches(TorchDispatchMode):
    """Counts operators that compute; views and allocations start nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        returned = [r.alias_info for r in func._schema.returns]
        is_view = bool(returned) and all(a is not None and not a.is_write for a in returned)
        on_host = bool(ACTIVE) and not ACTIVE[-1].computes
        if not (is_view or self.paused or on_host or name.startswith(_FREE)):
            self.kernels[name] += 1
        if name in ("mm", "addmm", "addmm_", "bmm"):
            left, right = (t for t in args[-2:])
            if left.numel() * right.shape[-1] > _LARGE:
                if name == "addmm_":
                    return args[0]
                out = (kwargs or {}).get("out")
                shape = (*left.shape[:-1], right.shape[-1])
                return left.new_zeros(shape) if out is None else out.zero_()
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Count:
    kernels: int
    waits: int


def groups(share: int = SHARE, groups: Any = GROUPS, loop: str = "fused") -> Iterator[Linears]:
    """Yield the groups of a block on the pretended GPU."""
    random = torch.Generator().manual_seed(0)
    for rows, columns in groups:
        weights = {
            name: torch.randn(count // share, columns, generator=random).to("cuda")
            for name, count in rows.items()
        }
        one_C = torch.ones(columns).to("cuda")
        sample_TC = torch.randn(256, columns, generator=random).to("cuda")
        gram_CC = torch.diag(one_C)
        inputs = Inputs(gram_CC, one_C, 256, 3 * one_C, gram_CC / 99, sample_TC)
        fold_C = None if "down_proj" in rows else torch.arange(columns).to("cuda")
        yield Linears(weights, inputs, fold_C, column_loop=loop, is_last="down_proj" in rows)


@contextmanager
def counted(share: int = SHARE) -> Iterator[tuple[Launches, Any]]:
    """Count on a pretended GPU; the fused kernel is one launch, made by the plain loop."""
    launches = Launches()

    def fused(*block: Any) -> None:
        launches.kernels["fused"] += 3  # and two transposes
        launches.paused = True
        gptq_solver.quantize_block(*block)
        launches.paused = False

    at_once = {kind: max(1, size // share) for kind, size in gguf._AT_ONCE.items()}
    with (
        pretended() as device,
        mock.patch.object(grid, "GPU_CHUNK", grid.GPU_CHUNK // share),
        mock.patch.object(awq, "GPU_CHUNK", awq.GPU_CHUNK // share),
        mock.patch.object(gguf, "_AT_ONCE", at_once),
        mock.patch.object(gguf, "_ELSEWHERE", gguf._ELSEWHERE // share),
        mock.patch("qaudit.core.schemes.gptq.LOOPS", {**column_loops.LOOPS, "fused": fused}),
    ):
        yield launches, device


@torch.no_grad()
def count(name: str, share: int = SHARE, shapes: Any = GROUPS, loop: str = "fused") -> Count:
    """Return what a scheme starts and waits for in one block."""
    scheme = parse_scheme(name)
    waits = 0
    with counted(share) as (launches, device):
        for linears in groups(share, shapes, loop):
            before = device.waits.total()
            with launches:
                scheme.quantize(linears)
            waits += device.waits.total() - before
    return Count(launches.kernels.total(), waits)


def count_learned(name: str) -> tuple[Count, Count]:
    """Return what a scheme that learns starts beside its steps, and in each, group by group.

    In a pass the linears of a block learn together, and each step sends a batch through it, too.
    """
    one, two = (count(f"{name}:steps={steps}", shapes=EIGHTH) for steps in (1, 2))
    step = Count(two.kernels - one.kernels, two.waits - one.waits)
    return Count(one.kernels - step.kernels, one.waits - step.waits), step


def main() -> None:
    names = sys.argv[1:] or [*DEFAULT_SCHEMES, *OTHERS, *LEARNED]
    counts: dict[str, Count] = {}
    for name in [name for name in names if name in LEARNED]:
        names.remove(name)
        fixed, step = count_learned(name)
        print(f"{name:<18}{fixed.kernels:>9,} kernels{fixed.waits:>7,} waits", end="")
        print(f", and {step.kernels:,} and {step.waits:,} a step", flush=True)
    for name in names:
        counts[name] = one = count(name)
        print(f"{name:<18}{one.kernels:>9,} kernels{one.waits:>7,} waits", flush=True)
    if not set(DEFAULT_SCHEMES) <= counts.keys():
        return
    streams = 1 + len(DEFAULT_SCHEMES)
    kinds = [parse_scheme(name).calibration for name in DEFAULT_SCHEMES]
    calibrating = sum(kind.has_stream for kind in kinds)
    calibrating += any(kind.reads_full_precision for kind in kinds)
    launched = sum(counts[name].kernels for name in DEFAULT_SCHEMES)
    launched = BLOCKS * (launched + FORWARD * (streams + calibrating))
    parameters = BLOCKS * sum(sum(rows.values()) * columns for rows, columns in GROUPS)
    floor = streams * TOKENS * 2 * (parameters + 100_352 * HIDDEN) / RATE
    print(f"default audit: {launched:,} launches, {launched * LAUNCH:.0f} s; floor {floor:.0f} s")


if __name__ == "__main__":
    main()
