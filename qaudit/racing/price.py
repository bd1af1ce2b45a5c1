"""What it costs a survivor of a race to go on: quantized again, or from weights that were kept.

To quantize again takes the arithmetic of a calibration pass; to go on from kept weights takes
the disk, written once and read once. Both are priced in seconds, and kept weights are chosen
where they are cheaper and where the disk has room for everyone's at once, because it is unknown
who will survive the first round.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from qaudit.core.scheme import Calibration, Scheme
from qaudit.planning.price import ITEMSIZE, Load, Sizes, flops, matmul_rate
from qaudit.report.format import duration, size
from qaudit.types import Plan

DISK_NBYTES_PER_SECOND = 300 * 10**6  # a disk that others use too
CUDA_FLOPS_PER_SECOND = 5 * 10**13  # of a data-centre GPU in 16 bits, about half of what it can


@dataclass(frozen=True)
class GoingOn:
    """The price of one survivor's next round, either way."""

    again_seconds: float
    kept_seconds: float
    kept_nbytes: int  # of everyone's weights
    room_nbytes: int

    @property
    def keep(self) -> bool:
        """Say that weights are kept."""
        return self.kept_seconds < self.again_seconds and self.kept_nbytes <= self.room_nbytes

    def __str__(self) -> str:
        """Print both prices and which is taken."""
        again = f"quantized again ({_about(self.again_seconds)} each time)"
        kept = (
            f"from kept weights ({_about(self.kept_seconds)} each time, "
            f"{size(self.kept_nbytes)} of disk)"
        )
        if self.keep:
            return f"survivors go on {kept} and are not {again}"
        if self.kept_seconds < self.again_seconds:
            return f"survivors are {again} and do not go on {kept}: {size(self.room_nbytes)} free"
        return f"survivors are {again} and do not go on {kept}"


def price_going_on(
    sizes: Sizes,
    scheme: Scheme,
    plan: Plan,
    *,
    calibration_tokens: int,
    room_nbytes: int,
) -> GoingOn:
    """Price one survivor's next round."""
    load = Load(
        calibration_tokens=calibration_tokens,
        evaluation_tokens=0,
        own_streams=int(scheme.calibration is Calibration.OWN_STREAM),
        shared_calibration=scheme.calibration is Calibration.FULL_PRECISION,
        schemes=1,
    )
    cuda = plan.device.startswith("cuda")
    rate = CUDA_FLOPS_PER_SECOND if cuda else matmul_rate() * (psutil.cpu_count() or 1)
    nbytes = sizes.blocks * sizes.block_parameters * ITEMSIZE[plan.dtype]
    return GoingOn(
        again_seconds=flops(sizes, load) / rate,
        kept_seconds=2 * nbytes / DISK_NBYTES_PER_SECOND,
        kept_nbytes=len(plan.subjects) * nbytes,
        room_nbytes=room_nbytes,
    )


def _about(seconds: float) -> str:
    return f"about {duration(seconds)}" if seconds >= 1 else "less than 1 s"
