"""What a later round of a race costs: quantized again, or from stored weights.

A race evaluates the same quantized model on more and more documents, and calibration is most of
what a pass costs. Both ways are priced in seconds. Weights are stored where that is cheaper and
where the disk has room for all subjects at once, because it is unknown which survive the first
round.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from qaudit.core.scheme import Scheme
from qaudit.planning.cost import ITEMSIZE, Load, flops, matmul_rate
from qaudit.planning.sizes import Sizes, TextSize
from qaudit.report.format import duration, size
from qaudit.types import Plan

DISK_NBYTES_PER_SECOND = 300 * 10**6  # a disk that others use too
CUDA_FLOPS_PER_SECOND = 5 * 10**13  # of a data-centre GPU in 16 bits, about half of what it can


@dataclass(frozen=True)
class RoundPrice:
    """What one subject costs in a later round, quantized again or from stored weights."""

    again_seconds: float
    stored_seconds: float
    stored_nbytes: int  # of all subjects
    room_nbytes: int

    @property
    def store(self) -> bool:
        return self.stored_seconds < self.again_seconds and self.stored_nbytes <= self.room_nbytes

    def __str__(self) -> str:
        again = f"quantized again ({_about(self.again_seconds)} each time)"
        stored = (
            f"from stored weights ({_about(self.stored_seconds)} each time, "
            f"{size(self.stored_nbytes)} of disk)"
        )
        if self.store:
            return f"survivors go on {stored} and are not {again}"
        if self.stored_seconds < self.again_seconds:
            return f"survivors are {again} and do not go on {stored}: {size(self.room_nbytes)} free"
        return f"survivors are {again} and do not go on {stored}"


def price_round(
    sizes: Sizes, scheme: Scheme, plan: Plan, *, calibration_tokens: int, room_nbytes: int
) -> RoundPrice:
    """Price a later round: arithmetic against a file that is written once and read once."""
    load = Load.of([scheme], TextSize(calibration_tokens, 0, plan.context))
    cuda = plan.device.startswith("cuda")
    rate = CUDA_FLOPS_PER_SECOND if cuda else matmul_rate() * (psutil.cpu_count() or 1)
    nbytes = sizes.blocks * sizes.block_parameters * ITEMSIZE[plan.dtype]
    return RoundPrice(
        again_seconds=flops(sizes, load) / rate,
        stored_seconds=2 * nbytes / DISK_NBYTES_PER_SECOND,
        stored_nbytes=len(plan.subjects) * nbytes,
        room_nbytes=room_nbytes,
    )


def _about(seconds: float) -> str:
    return f"about {duration(seconds)}" if seconds >= 1 else "less than 1 s"
