"""Quantized linears -> the tensors of a file, block by block, with the hashes of what they hold.

A scheme that multiplies columns measures the weights that it divides again. A file holds them
multiplied, beside a norm or an earlier linear that is divided. Powers of two divide any number
exactly; with other scales a file would hold other weights than were measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from qaudit.checkpoints.safetensors import ShardWriter
from qaudit.core.linears import FoldSource, IntegerCodes, Linears, Quantized, StoredWeight
from qaudit.core.scheme import Scheme
from qaudit.engine.kept_weights import sha256_of
from qaudit.errors import ModelError, SchemeError
from qaudit.formats.packing import Format
from qaudit.model.stored_names import Unfused
from qaudit.settings import EXAMPLE_SCHEME
from qaudit.support.lazy import Tensor, torch

_UNSCALED = f"export a scheme that scales no columns, such as {EXAMPLE_SCHEME}"


@dataclass(eq=False)
class Packed:
    """What was packed so far, and the block that is not among the shards yet."""

    form: Format
    weights: Unfused
    shards: ShardWriter | None = None  # without, linears are tried and nothing is written
    dense: dict[str, str] = field(default_factory=dict)  # linear -> sha256 of its dense weight
    rest: dict[str, str] = field(default_factory=dict)  # other tensors, by name
    mixed: dict[str, int] = field(default_factory=dict)  # bits of each linear of a mixture
    is_symmetric: bool = True
    _nbytes: int = 0  # of everything that is stored of linears
    _block: int = -1
    _tensors: dict[str, Tensor] = field(default_factory=dict)  # of the block
    _stored: dict[str, tuple[StoredWeight, torch.dtype]] = field(default_factory=dict)

    @property
    def bits_per_weight(self) -> float:
        shapes = (self.weights.shape(f"{linear}.weight") for linear in self.dense)
        return 8 * self._nbytes / max(sum(map(prod, shapes)), 1)

    def add(self, _: Scheme, linears: Linears, quantized: Quantized) -> None:
        if linears.block != self._block:
            self._end_block()
            self._block = linears.block
        scale_C = quantized.column_scale_C
        if scale_C is not None:
            self._fold(linears, scale_C)
        for name, dense_RC in quantized.weights.items():
            linear = self._stored_name(name)
            if tuple(self.weights.shape(f"{linear}.weight")) != tuple(dense_RC.shape):
                raise _fused(self._block, name)
            # A file holds columns times their scales, which are powers of two.
            dense_RC = dense_RC if scale_C is None else dense_RC * scale_C.to(dense_RC.dtype)
            self._pack(linear, quantized.stored[name], dense_RC)

    def add_rest(self, shards: ShardWriter) -> None:
        """Add what is not quantized, but for norms and biases that took scales."""
        self._end_block()
        written = {*self.rest, *(f"{linear}.weight" for linear in self.dense)}
        for name in self.weights.names():
            if name not in written:
                tensor = self.weights.read(name).contiguous()
                self.rest[name] = sha256_of(self.form.as_compared(tensor))
                shards.add({name: tensor})

    def _end_block(self) -> None:
        self._nbytes += sum(t.nbytes for name, t in self._tensors.items() if name not in self.rest)
        if self.shards is not None:
            self.shards.add(self._tensors)
        self._tensors, self._stored = {}, {}

    def _pack(self, linear: str, stored: StoredWeight, dense_RC: Tensor) -> None:
        self._tensors |= self.form.pack(linear, stored)
        self._stored[linear] = (stored, dense_RC.dtype)
        self.dense[linear] = sha256_of(dense_RC)
        self.is_symmetric &= getattr(stored, "zeros_RG", None) is None
        if self.form.scheme.mixes_bits and isinstance(stored, IntegerCodes):
            self.mixed[linear] = stored.bits

    def _fold(self, linears: Linears, scale_C: Tensor) -> None:
        source, fold_C, scheme = linears.fold_source, linears.fold_C, self.form.scheme
        if source is None or fold_C is None:
            raise rounded(scheme)
        scale_R = scale_of_rows(scheme, source, fold_C, scale_C)
        name = self._stored_name(source.name)
        if not source.is_norm:
            stored, dtype = self._stored[name]
            codes = divided_codes(name, stored, scale_R)
            self._pack(name, codes, codes.decode().to(dtype))
        for tensor in (f"{name}.weight", f"{name}.bias"):
            if tensor in self.weights.names() and (source.is_norm or tensor.endswith("bias")):
                one_plus = source.one_plus and tensor.endswith("weight")
                whole = divided(tensor, self.weights.read(tensor), scale_R, one_plus=one_plus)
                self._tensors[tensor] = whole
                self.rest[tensor] = sha256_of(self.form.as_compared(whole))

    def _stored_name(self, name: str) -> str:
        """Return the name of a linear or norm in the checkpoint, without `.weight`."""
        stored = self.weights.stored_name(self._block, f"{name}.weight")
        if not stored.endswith(".weight"):
            raise _fused(self._block, name)
        return stored.removesuffix(".weight")


def _fused(block: int, name: str) -> ModelError:
    return ModelError(
        f"the checkpoint has no tensor of its own for `{name}` of block {block}",
        hint="models that store linears fused or transposed cannot be exported yet",
    )


def refuse_rounded(scheme: Scheme) -> None:
    """Refuse a scheme whose scales of columns no file holds, by its parameters."""
    if getattr(scheme, "unfolded", False):
        raise SchemeError(
            f"`{scheme.short}` has scales of columns that a kernel applies, and no current "
            "runtime has such a kernel",
            hint="scan and export with unfolded=false",
        )
    if getattr(scheme, "exact_fold", True) is False:
        raise rounded(scheme)


def rounded(scheme: Scheme) -> SchemeError:
    """Make the error for scales that are no powers of two."""
    return SchemeError(
        f"`{scheme.short}` divides norms and earlier linears by scales that a file would round: "
        "it would hold other weights than were measured",
        hint="scan and export with exact_fold=true, which has powers of two",
    )


def scale_of_rows(scheme: Scheme, source: FoldSource, fold_C: Tensor, scale_C: Tensor) -> Tensor:
    """Return the divisors of the first rows of a source, from its offset on."""
    mantissa_C, _ = torch.frexp(scale_C)
    if not bool((mantissa_C == 0.5).all()):
        raise rounded(scheme)
    size = source.offset + int(fold_C.max()) + 1
    scale_R = torch.ones(size, dtype=scale_C.dtype, device=scale_C.device)
    scale_R[source.offset + fold_C] = scale_C
    return scale_R.cpu()


def divided_codes(name: str, stored: StoredWeight, scale_R: Tensor) -> IntegerCodes:
    """Divide the rows of a quantized linear by dividing its scales; codes stay."""
    if not isinstance(stored, IntegerCodes):
        what = f"`{name}` has no scales that could take those of the linears behind it"
        raise SchemeError(what, hint=_UNSCALED)
    return replace(stored, scales_RG=divided(name, stored.scales_RG.cpu(), scale_R))


def divided(name: str, tensor: Tensor, scale_R: Tensor, *, one_plus: bool = False) -> Tensor:
    """Divide rows, or the numbers of a norm; refuse what the tensor's dtype does not hold."""
    scales = torch.ones(len(tensor), dtype=torch.float64)
    scales[: len(scale_R)] = scale_R
    scales = scales.reshape(-1, *[1] * (tensor.dim() - 1))
    wide = tensor.double()
    exact = (1 + wide) / scales - 1 if one_plus else wide / scales
    held = exact.to(tensor.dtype)
    if not torch.equal(held.double(), exact):
        raise SchemeError(
            f"`{name}` is stored in {str(tensor.dtype).removeprefix('torch.')}, which does not "
            "hold its numbers divided by the scales of the linears behind it",
            hint=_UNSCALED,
        )
    return held
