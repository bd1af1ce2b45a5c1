"""The bytes of a subject: all of its tensors as they are stored, and with its linears quantized.

A quantized model keeps embeddings, head, norms and biases as they are stored, so that its size
is that of the subject, less its linears, plus what a scheme stores for these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from qaudit.checkpoints.safetensors import headers, unread_tensors
from qaudit.engine.tally import Tally
from qaudit.engine.tasks import Task
from qaudit.errors import SourceError
from qaudit.formats.weights import QuantizedFolder
from qaudit.model.blocks import Weights


@dataclass(frozen=True)
class StoredStream:
    """The tensors of a subject."""

    elements: Mapping[str, int]
    nbytes: Mapping[str, int]  # empty: of pickled tensors only the sum is known
    total_nbytes: int
    unread_nbytes: int = 0  # of files that are not downloaded

    @property
    def parameters(self) -> int:
        return sum(self.elements.values())

    @property
    def whole_nbytes(self) -> int:
        return self.total_nbytes + self.unread_nbytes

    def quantized_nbytes(self, tally: Tally) -> int | None:
        """Return the bytes of all tensors with the linears of a tally quantized.

        None where it is not known what the linears take as they are stored.
        """
        linears = self._nbytes_of(tally)
        return None if linears is None else self.whole_nbytes - linears + -(-tally.bits // 8)

    def _nbytes_of(self, tally: Tally) -> int | None:
        """Return the bytes of a tally's linears, by name or by their one dtype."""
        if not self.nbytes:
            return round(self.total_nbytes * tally.weights / self.parameters)
        ends = tuple(
            end for linear in tally.linears for end in (f".{linear}.weight", *_joined(linear))
        )
        names = [name for name in self.elements if name.endswith(ends)]
        if sum(self.elements[name] for name in names) == tally.weights:
            return sum(self.nbytes[name] for name in names)
        # The checkpoint has other names than the library's modules.
        sizes = {self.nbytes[name] / count for name, count in self.elements.items() if count > 1}
        return round(tally.weights * sizes.pop()) if len(sizes) == 1 else None


def _joined(linear: str) -> tuple[str, ...]:
    """Return the ends of names under which the experts of a linear are stored in one tensor."""
    match = re.fullmatch(r"(.*experts)\.\d+\.(gate|up|down)_proj", linear)
    if match is None:
        return ()
    role = "down_proj" if match[2] == "down" else "gate_up_proj"
    return (f".{match[1]}.{role}", f".{match[1]}.{role}.weight")


def stored(task: Task, weights: Weights) -> StoredStream:
    """Read the sizes of a subject's tensors; of a soup those of its first member."""
    elements = {name: math.prod(weights.shape(name)) for name in weights.names()}
    first = task.subject.first
    if isinstance(weights, QuantizedFolder):
        nbytes = {name: weights.nbytes_of(name) for name in elements}
        return StoredStream(elements, nbytes, weights.nbytes)
    try:
        whole = first.base if first.base is not None and first.is_adapter else first
        folder = task.folder(whole)
        tensors = headers(folder, unread_tensors([folder], [whole]))
    except SourceError:  # pickled: what the files take is near enough
        return StoredStream(elements, {}, first.nbytes)
    nbytes = {name: tensors[name].nbytes for name in elements}
    unread_nbytes = sum(file.nbytes for file in first.unread)
    return StoredStream(elements, nbytes, sum(nbytes.values()), unread_nbytes)
