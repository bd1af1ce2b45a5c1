"""The blocks of an export that are quantized already: files that an interrupted run goes on from.

A block's tensors are written when its last linear is quantized, beside the hashes of its dense
weights. The same command finds them again; codes of a block that is there are read, not computed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from qaudit.checkpoints.safetensors import SINGLE, WeightFolder
from qaudit.core.linears import IntegerCodes, Linears, Quantize, Quantized, WholeBlock
from qaudit.core.scheme import Scheme
from qaudit.engine.kept_weights import sha256_of
from qaudit.errors import MachineError, ModelError, not_written
from qaudit.export.folds import divided, divided_codes, rounded, scale_of_rows
from qaudit.formats.packing import Format
from qaudit.support.lazy import Tensor
from qaudit.whole import write_whole

if TYPE_CHECKING:
    from qaudit.core.linears import StoredWeight
    from qaudit.model.blocks import Weights


_REST_NBYTES = 2**28  # of unquantized tensors in one part


@dataclass(frozen=True)
class Part:
    """What one file of a part holds, beside it as JSON."""

    file: str
    dense: dict[str, str]  # linear -> sha256 of its dense weight
    rest: dict[str, str]  # other tensors, by name
    nbytes: int  # of everything that is stored of its linears
    symmetric: bool | None = None
    mixed: dict[str, int] = field(default_factory=dict)  # bits of each linear of a mixture


@dataclass(eq=False)
class Parts:
    """The files of a begun export."""

    folder: Path
    form: Format
    weights: Weights
    names: Callable[[int, str], str]  # stored name of a parameter of a block, if it has one
    done: dict[str, Part] = field(default_factory=dict)  # by name of the part, in order
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _dense: dict[str, str] = field(default_factory=dict)
    _rest: dict[str, str] = field(default_factory=dict)
    _stored: dict[str, tuple[StoredWeight, Any]] = field(default_factory=dict)  # of this block
    _mixed: dict[str, int] = field(default_factory=dict)
    _symmetric: bool | None = None
    _block: int | None = None

    @property
    def mixed(self) -> dict[str, int]:
        return {name: bits for part in self.done.values() for name, bits in part.mixed.items()}

    def open(self) -> None:
        try:
            for path in sorted(self.folder.glob("block-*.json")):
                self.done[path.stem] = Part(**json.loads(path.read_text()))
        except OSError as error:
            raise not_written(self.folder, error) from error

    def remove(self) -> None:
        """Begin anew."""
        for name in self.done:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / f"{name}.json").unlink(missing_ok=True)
        self.done.clear()

    def enter(self, block: int) -> None:
        """Write the block before, which is complete."""
        if self._block is not None and block != self._block:
            self.end_block()
        self._block = block

    def watch(self, scheme: Scheme, linears: Linears, quantized: Quantized) -> None:
        if self.holds(linears.block):
            return
        scale_C = quantized.column_scale_C
        if scale_C is not None:
            self._fold(scheme, linears, scale_C)
        for name, dense_RC in quantized.weights.items():
            linear = self.linear(linears.block, name, tuple(dense_RC.shape))
            # A file holds columns times their scales, which are powers of two.
            dense_RC = dense_RC if scale_C is None else dense_RC * scale_C.to(dense_RC.dtype)
            self._pack(linear, quantized.stored[name], dense_RC)

    def _pack(self, linear: str, stored: StoredWeight, dense_RC: Tensor) -> None:
        self._tensors |= self.form.pack(linear, stored)
        self._dense[linear] = sha256_of(dense_RC)
        self._symmetric = getattr(stored, "zeros_RG", None) is None
        if self.form.scheme.mixes_bits and isinstance(stored, IntegerCodes):
            self._mixed[linear] = stored.bits
        self._stored[linear] = (stored, dense_RC.dtype)

    def _fold(self, scheme: Scheme, linears: Linears, scale_C: Tensor) -> None:
        source, fold_C = linears.fold_source, linears.fold_C
        if source is None or fold_C is None:
            raise rounded(scheme)
        scale_R = scale_of_rows(scheme, source, fold_C, scale_C)
        name = self._base(linears.block, source.name)
        if not source.is_norm:
            stored, dtype = self._stored[name]
            codes = divided_codes(name, stored, scale_R)
            self._pack(name, codes, codes.decode().to(dtype))
        for tensor in (f"{name}.weight", f"{name}.bias"):
            if tensor in self.weights.names() and (source.is_norm or tensor.endswith("bias")):
                one_plus = source.one_plus and tensor.endswith("weight")
                whole = divided(tensor, self.weights.read(tensor), scale_R, one_plus=one_plus)
                self._tensors[tensor] = whole
                self._rest[tensor] = sha256_of(self.form.as_compared(whole))

    def linear(self, block: int, name: str, shape: tuple[int, ...]) -> str:
        """Return the name of a linear in the checkpoint, without `.weight`."""
        base = self._base(block, name)
        if tuple(self.weights.shape(f"{base}.weight")) != shape:
            raise _fused(block, name)
        return base

    def _base(self, block: int, name: str) -> str:
        stored = self.names(block, f"{name}.weight")
        if not stored.endswith(".weight"):
            raise _fused(block, name)
        return stored.removesuffix(".weight")

    def end_block(self) -> None:
        if self._block is not None and not self.holds(self._block):
            self._write(_name(self._block))
        self._block = None

    def add_rest(self) -> None:
        parts = self.done.values()
        written = {f"{linear}.weight" for part in parts for linear in part.dense}
        written |= {name for part in parts for name in part.rest}  # folded norms and biases
        number = 0
        for name in self.weights.names():
            if name in written:
                continue
            tensor = self.weights.read(name).contiguous()
            self._tensors[name] = tensor
            self._rest[name] = sha256_of(self.form.as_compared(tensor))
            if sum(one.nbytes for one in self._tensors.values()) >= _REST_NBYTES:
                self._write(f"rest-{number:05}")
                number += 1
        if self._tensors:
            self._write(f"rest-{number:05}")

    def holds(self, block: int) -> bool:
        return _name(block) in self.done

    def dense(self, block: int, name: str, like_RC: Tensor) -> Tensor:
        """Return the weight of a linear on disk, of the type of the one that was quantized."""
        linear = self.linear(block, name, tuple(like_RC.shape))
        files = WeightFolder(self.folder / _name(block))
        self.form.mixed = self.mixed
        config = self.form.config((), symmetric=self.done[_name(block)].symmetric is not False)
        return self.form.dense(files, linear, config).to(like_RC)

    def _write(self, name: str) -> None:
        nbytes = sum(one.nbytes for key, one in self._tensors.items() if key not in self._rest)
        made = self._dense, self._rest, nbytes, self._symmetric, self._mixed
        part = Part(f"{name}/{SINGLE}", *made)
        path = self.folder / part.file
        try:
            path.parent.mkdir(exist_ok=True)
            save_file(self._tensors, path.with_suffix(".partial"), metadata={"format": "pt"})
            path.with_suffix(".partial").replace(path)
        except OSError as error:
            raise not_written(path, error) from error
        except SafetensorError as error:  # its own, for a disk that takes no more, too
            raise MachineError(
                f"`{path}` cannot be written: {error}",
                hint="free some space and run the same command again",
            ) from error
        write_whole(self.folder / f"{name}.json", json.dumps(asdict(part)))
        self.done[name] = part
        self._tensors, self._dense, self._rest, self._stored, self._mixed = {}, {}, {}, {}, {}


def _fused(block: int, name: str) -> ModelError:
    return ModelError(
        f"the checkpoint has no tensor of its own for `{name}` of block {block}",
        hint="models that store linears fused or transposed cannot be exported yet",
    )


def _name(block: int) -> str:
    return f"block-{block:05}"


@dataclass(frozen=True, eq=False)
class Continued:
    """Quantizes as `scheme` does, and reads what `parts` hold of it.

    Files hold the same dense weights as before, so that later blocks are calibrated on the same
    inputs. A scheme that reads full-precision inputs needs none of them.
    """

    scheme: Scheme
    parts: Parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheme, name)

    def quantize(self, linears: Linears) -> Quantized:
        return self._quantize(linears, self.scheme.quantize)

    def train(self, block: WholeBlock) -> Quantize:
        if self.parts.holds(block.groups[0].block):
            return self.quantize
        quantize = self.scheme.train(block)
        return lambda linears: self._quantize(linears, quantize)

    def _quantize(self, linears: Linears, quantize: Quantize) -> Quantized:
        self.parts.enter(linears.block)
        if not self.parts.holds(linears.block):
            return quantize(linears)
        if not self.scheme.calibration.has_stream:
            return Quantized(linears.weights, bits=0)
        weights = {
            name: self.parts.dense(linears.block, name, weight_RC)
            for name, weight_RC in linears.weights.items()
        }
        return Quantized(weights, bits=0)
