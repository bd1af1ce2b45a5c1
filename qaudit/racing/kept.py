"""Quantized weights kept on the disk, so that a later pass goes on without calibrating again.

What a scheme makes depends on the weights and on the calibration text, not on what is evaluated.
A race evaluates the same quantized model on more and more documents, and calibration is most of
what a pass costs. So the first pass writes down what the scheme made of every group of linears,
and later passes read it: `Keeping` and `Kept` wrap the scheme and have its name, so
that nothing else in the engine knows, and a measurement has the same identity and, to the bit,
the same numbers either way. Groups are identified by the names of their linears and by how often
these came before, which is the number of the block.

Weights are kept dequantized, in the dtype that they are computed in; codes would take a quarter
of the disk, and a format for each scheme. A scheme with forwards of its own cannot be kept.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qaudit.core.scheme import Calibration, Linears, Quantized
from qaudit.engine.stand_in import StandIn
from qaudit.errors import MachineError, not_written
from qaudit.types import digest

WENT_ON = "went on from kept quantized weights"
"""The note of a measurement that was not calibrated for by itself."""

_WHOLE = "whole"


@dataclass(frozen=True, kw_only=True)
class _OnDisk(StandIn):
    """A scheme whose groups are in files."""

    folder: Path
    seen: Counter[str] = field(default_factory=Counter, compare=False)
    left_out: list[str] = field(default_factory=list, compare=False)

    def file(self, linears: Linears) -> Path:
        """Return where a group lies, asked for once for each group in the order of the blocks."""
        names = digest(list(linears.weights))[:16]
        self.seen[names] += 1
        return self.folder / f"{names}-{self.seen[names] - 1}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Keeping(_OnDisk):
    """Quantize as the scheme does, and write down what comes of it."""

    def __post_init__(self) -> None:
        """Calibrate as the scheme does."""
        super().__post_init__()
        object.__setattr__(self, "calibration", self.inner.calibration)

    def quantize(self, linears: Linears) -> Quantized:
        """Quantize the linears, and keep them."""
        quantized = self.inner.quantize(linears)
        if quantized.forwards:
            self.left_out.extend(linears.weights)
        else:
            self._write(quantized, self.file(linears))
        return quantized

    def _write(self, quantized: Quantized, path: Path) -> None:
        tensors = {name: w.detach().cpu().contiguous() for name, w in quantized.weights.items()}
        about = {"bits": quantized.bits, "notes": list(quantized.notes)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path, metadata={"about": json.dumps(about)})
        except OSError as error:
            raise not_written(path, error) from error
        except SafetensorError as error:  # what it says of a full disk
            raise MachineError(
                f"`{path}` cannot be written: {error}", hint="free some space on this disk"
            ) from error

    def finish(self) -> None:
        """Say that everything was kept, if it was."""
        if self.seen and not self.left_out:
            (self.folder / _WHOLE).write_text(str(sum(self.seen.values())), encoding="ascii")


@dataclass(frozen=True, kw_only=True)
class Kept(_OnDisk):
    """Put in place what was written down before."""

    def __post_init__(self) -> None:
        """Want no calibration."""
        super().__post_init__()
        object.__setattr__(self, "calibration", Calibration.NONE)

    def quantize(self, linears: Linears) -> Quantized:
        """Read the linears."""
        path = self.file(linears)
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["about"])
                weights = {
                    name: file.get_tensor(name).to(weight.device)
                    for name, weight in linears.weights.items()
                }
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise MachineError(
                f"the quantized weights kept in `{path}` cannot be read: {error}",
                hint=f"remove `{self.folder}` and run the same command again",
            ) from error
        return Quantized(weights, about["bits"], (*about["notes"], WENT_ON))


def is_whole(folder: Path) -> bool:
    """Say whether a model's quantized weights were all kept in a folder."""
    try:
        count = int((folder / _WHOLE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    return count == len(list(folder.glob("*.safetensors")))


def forget(folder: Path) -> None:
    """Remove what was kept."""
    with suppress(OSError):
        shutil.rmtree(folder)
