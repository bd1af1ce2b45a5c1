"""Quantized weights stored on the disk, so that a later round need not calibrate again.

What a scheme makes depends on the weights and on the calibration text, not on the evaluated text.
A race evaluates the same quantized model on more and more documents, and calibration is most of
what a pass costs. So the first pass writes what the scheme made of every group of linears, and
later passes read it: `Storing` and `Stored` wrap the scheme and have its name, so that a
measurement has the same identity and, to the bit, the same numbers either way. Groups are
identified by the names of their linears and by how often these came before, which is the number
of the block.

Weights are stored dequantized, in the dtype that they are computed in; codes would take a quarter
of the disk, and a format for each scheme. A scheme with forwards or inputs of its own cannot be
stored.

Both ways are priced in seconds. Weights are stored where that is cheaper and where the disk has
room for all subjects at once, because it is unknown which survive the first round.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qaudit.core.scheme import Calibration, Linears, Quantized
from qaudit.engine.stand_in import StandIn
from qaudit.errors import MachineError, not_written
from qaudit.planning.price import ITEMSIZE, Load, Sizes, flops, matmul_rate
from qaudit.report.format import duration, size
from qaudit.types import Plan, digest

REUSED = "went on from kept quantized weights"
"""The note of a measurement that reused the quantized weights of another."""

DISK_NBYTES_PER_SECOND = 300 * 10**6  # a disk that others use too
CUDA_FLOPS_PER_SECOND = 5 * 10**13  # of a data-centre GPU in 16 bits, about half of what it can

_WHOLE = "whole"


@dataclass(frozen=True, kw_only=True)
class _OnDisk(StandIn):
    """A scheme whose groups are in files."""

    folder: Path
    seen: Counter[str] = field(default_factory=Counter, compare=False)

    def next_file(self, linears: Linears) -> Path:
        """Return the file of a group; called once for each group in the order of the blocks."""
        names = digest(list(linears.weights))[:16]
        self.seen[names] += 1
        return self.folder / f"{names}-{self.seen[names] - 1}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Storing(_OnDisk):
    """Quantize as the scheme does, and write the result."""

    left_out: list[str] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "calibration", self.inner.calibration)

    def quantize(self, linears: Linears) -> Quantized:
        quantized = self.inner.quantize(linears)
        if quantized.forwards or quantized.inputs:
            self.left_out.extend(linears.weights)
        else:
            self._write(quantized, self.next_file(linears))
        return quantized

    def _write(self, quantized: Quantized, path: Path) -> None:
        tensors = {name: w.detach().cpu().contiguous() for name, w in quantized.weights.items()}
        about = {"bits": quantized.bits, "notes": list(quantized.notes)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path, metadata={"about": json.dumps(about)})
        except OSError as error:
            raise not_written(path, error) from error
        except SafetensorError as error:  # raised for a full disk
            raise MachineError(
                f"`{path}` cannot be written: {error}", hint="free some space on this disk"
            ) from error

    def finish(self) -> None:
        """Mark the folder as whole if every group was written."""
        if self.seen and not self.left_out:
            (self.folder / _WHOLE).write_text(str(sum(self.seen.values())), encoding="ascii")


@dataclass(frozen=True, kw_only=True)
class Stored(_OnDisk):
    """Read what was written before, without calibration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "calibration", Calibration.NONE)

    def quantize(self, linears: Linears) -> Quantized:
        path = self.next_file(linears)
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["about"])
                weights = {
                    name: file.get_tensor(name).to(weight.device)
                    for name, weight in linears.weights.items()
                }
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise MachineError(
                f"the quantized weights in `{path}` cannot be read: {error}",
                hint=f"remove `{self.folder}` and run the same command again",
            ) from error
        return Quantized(weights, about["bits"], (*about["notes"], REUSED))


def is_whole(folder: Path) -> bool:
    """Return whether all quantized weights of a model are in a folder."""
    try:
        count = int((folder / _WHOLE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    return count == len(list(folder.glob("*.safetensors")))


def remove(folder: Path) -> None:
    """Remove stored weights."""
    with suppress(OSError):
        shutil.rmtree(folder)


# ------------------------------------------------------------------------------------ the price


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
    sizes: Sizes, calibration: Calibration, plan: Plan, *, calibration_tokens: int, room_nbytes: int
) -> RoundPrice:
    """Price a later round: arithmetic against a file that is written once and read once."""
    load = Load(
        calibration_tokens=calibration_tokens,
        evaluation_tokens=0,
        own_streams=int(calibration is Calibration.OWN_STREAM),
        shared_calibration=calibration is Calibration.FULL_PRECISION,
        schemes=1,
    )
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
