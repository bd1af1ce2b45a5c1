"""What a pass takes of the disk beside downloads, and whether it is there.

Hidden states that memory does not hold are in the folder for temporary files. Where items of tasks
go through in several rounds, quantized weights are kept in the output folder between them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qaudit.checkpoints.places import hub_cache
from qaudit.core.scheme import Calibration, Scheme
from qaudit.core.sizes import size, typed_size
from qaudit.errors import MachineError
from qaudit.planning.memory import stream_nbytes
from qaudit.planning.price import ROUND_TOKENS, Load, Sizes
from qaudit.planning.traffic import free_disk_nbytes, shares_disk


@dataclass(frozen=True)
class Scratch:
    """The rounds of a pass, and the most bytes that it takes of the disk for itself."""

    rounds: int
    weights_nbytes: int  # quantized, between rounds
    spilled_nbytes: int  # hidden states beyond the memory for them
    limit_nbytes: int  # that memory
    most_items: int = 0  # of the largest task

    @classmethod
    def of(
        cls,
        sizes: Sizes,
        load: Load,
        schemes: Sequence[Scheme],
        itemsize: int,
        limit_nbytes: int,
        items: Sequence[tuple[str, int]] = (),
    ) -> Scratch:
        """Return what the passes of a plan take at most."""
        rounds = math.ceil(load.item_tokens / ROUND_TOKENS)
        calibrated = sum(scheme.calibration is not Calibration.NONE for scheme in schemes)
        weights = calibrated * sizes.blocks * sizes.block_parameters * itemsize
        spilled = max(0, stream_nbytes(sizes, load, itemsize) - limit_nbytes)
        most = max((count for _, count in items), default=0)
        return cls(rounds, weights if rounds > 1 else 0, spilled, limit_nbytes, most)

    @property
    def nbytes(self) -> int:
        return self.weights_nbytes + self.spilled_nbytes

    @property
    def notes(self) -> tuple[str, ...]:
        if self.rounds < 2:
            return ()
        return (
            f"the items of tasks go through in about {self.rounds} rounds of "
            f"{ROUND_TOKENS / 1e6:g} M tokens; beside downloads they take up to "
            f"{size(self.nbytes)} of disk: quantized weights between rounds "
            f"{size(self.weights_nbytes)}, hidden states beyond the memory for them "
            f"{size(self.spilled_nbytes)}",
        )

    def refuse_short_disk(self, out: Path, downloads_nbytes: int) -> None:
        """Refuse what the disks do not hold, beside downloads that share them."""
        temporary = Path(tempfile.gettempdir())
        needs = {out: self.weights_nbytes, temporary: self.spilled_nbytes}
        if shares_disk(out, temporary):
            needs = {out: self.nbytes}
        for place, needed in needs.items():
            free = free_disk_nbytes(place)
            free -= downloads_nbytes if shares_disk(place, hub_cache()) else 0
            if needed > max(0, free):
                raise MachineError(
                    f"this audit needs up to {size(needed)} of disk in `{place}` beside downloads, "
                    f"and {size(max(0, free))} are free: quantized weights between rounds take "
                    f"{size(self.weights_nbytes)}, hidden states {size(self.spilled_nbytes)}",
                    hint=self._hint(needed - free),
                )

    def _hint(self, short_nbytes: int) -> str:
        ways = []
        if self.spilled_nbytes >= short_nbytes:
            ways.append(f"`--stream-memory {typed_size(self.limit_nbytes + short_nbytes)}`")
        if self.rounds > 1:
            ways.append(f"`--task-items {max(1, self.most_items // self.rounds)}`")
        if self.spilled_nbytes:
            ways.append("`TMPDIR` on a larger disk")
        return f"it may fit with {' or with '.join(ways)}"
