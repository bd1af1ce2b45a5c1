"""Linears of one block that read the same input: what a scheme is given, and what it makes of them.

Shapes: R output rows, C input columns, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from qaudit.core.stored import StoredWeight
from qaudit.errors import SourceError
from qaudit.support.lazy import Tensor, torch


@dataclass(frozen=True, eq=False)
class Inputs:
    """Second-order statistics of the calibration tokens that reached a group of linears."""

    gram_CC: Tensor  # sum over tokens of x x^T, float32
    absmean_C: Tensor  # mean over tokens of |x|, float32
    tokens: int
    absmax_C: Tensor | None = None  # largest |x| of any token, float32
    # Sum over tokens of (x' - x) x^T, where x' is what the unquantized model reads in place of x.
    # None where that is x itself.
    drift_CC: Tensor | None = None
    sample_TC: Tensor | None = None  # some of the tokens, evenly spaced
    seen: int | None = None  # tokens routed to an expert, where these are an expert's inputs


Around = Callable[[Sequence[Callable[[], Mapping[str, "Tensor"]]]], list[float]]
"""Return for other weights of a group the squared error of what the module around it returns."""


@dataclass(frozen=True)
class Rows:
    """Rows of a linear that may be rotated, and in blocks of which width."""

    start: int
    stop: int
    width: int


@dataclass(frozen=True)
class FoldSource:
    """What absorbs a scale of columns: a norm's weight, or rows of an earlier linear."""

    name: str
    is_norm: bool
    offset: int = 0  # the first row of the linear; an index of `fold_C` counts from it
    one_plus: bool = False  # a norm that multiplies by (1 + weight)


@dataclass(frozen=True, eq=False)
class Linears:
    """Linears of one block that read the same input.

    `fold_C` says where a per-column scale could be absorbed exactly by what precedes the
    linears: columns with the same index share one scale; `None` means nothing can absorb it.
    `fold_is_norm` tells whether that is the weight of a norm, and `block_has_norm_folds` whether
    any group of the block has such a fold: in a post-norm model none does. `norm_C` is that norm's
    weight, and `fold_source` names what absorbs the scale. `rows` are outputs that can be rotated
    for nothing (`qaudit/model/turns.py`), where a scheme asks for them.
    """

    weights: Mapping[str, Tensor]  # name -> (R, C), floating point, untouched by the scheme
    inputs: Inputs | None = None
    fold_C: Tensor | None = None
    block: int = 0  # which block they are of
    blocks: int = 1  # and of how many
    fold_is_norm: bool = False
    block_has_norm_folds: bool = False
    norm_C: Tensor | None = None
    fold_source: FoldSource | None = None
    rows: Mapping[str, Rows] | None = None  # by linear
    is_last: bool = False  # whether no linear of the block reads what these compute
    column_loop: str = "plain"  # how GPTQ's columns are rounded (`qaudit/core/column_loops.py`)
    around: Around | None = None  # where a scheme compares modules
    # What the unquantized model reads, batch by batch as (T, C), where a scheme compares modules.
    tokens: Callable[[], Iterator[Tensor]] | None = None

    @property
    def columns(self) -> int:
        return next(iter(self.weights.values())).shape[1]

    def widened(self) -> Iterator[tuple[str, Tensor]]:
        """Yield one weight after the other in float32, or as it is where that is wider."""
        for name, weight_RC in self.weights.items():
            yield name, weight_RC.detach().to(torch.promote_types(weight_RC.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class Quantized:
    """What a scheme made of the linears it was given.

    A weight is its stored form, decoded, divided by `column_scale_C` where there is one, and
    rounded to the dtype that was given. With `inputs` the linears compute inputs(x) W^T: what a
    rotation changes in the weights, `inputs` changes in x, each token by itself.
    """

    weights: Mapping[str, Tensor]  # name -> dequantized (R, C), same dtype as given
    bits: int  # storage of all of them: codes, scales, zero points
    notes: tuple[str, ...] = ()
    forwards: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # x -> x W^T
    stored: Mapping[str, StoredWeight] = field(default_factory=dict)
    column_scale_C: Tensor | None = None  # what the inputs of all these linears are divided by
    inputs: Callable[[Tensor], Tensor] | None = None  # what all of them read in place of x


def decoded(
    linears: Linears,
    stored: Mapping[str, StoredWeight],
    notes: tuple[str, ...] = (),
    *,
    column_scale_C: Tensor | None = None,
    forwards: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    inputs: Callable[[Tensor], Tensor] | None = None,
) -> Quantized:
    weights = {}
    for name, original_RC in linears.weights.items():
        weight_RC = stored[name].decode()
        if column_scale_C is not None:
            weight_RC = weight_RC.to(column_scale_C.dtype).div_(column_scale_C)
        weights[name] = weight_RC.to(original_RC.dtype)
    bits = sum(part.nbits for part in stored.values())
    return Quantized(weights, bits, notes, forwards or {}, stored, column_scale_C, inputs)


def refuse_nonfinite(linears: Linears) -> None:
    """Refuse linears with a weight, or inputs, that are not finite numbers."""
    for name, weight_RC in linears.weights.items():
        if not _is_finite(weight_RC):
            raise SourceError(
                f"the weight of `{name}` holds NaN or infinity",
                hint="the checkpoint is damaged or its training diverged; try another revision",
            )
    inputs = linears.inputs
    moments = [] if inputs is None else [inputs.gram_CC, inputs.absmean_C, inputs.drift_CC]
    if not all(_is_finite(moment) for moment in moments if moment is not None):
        names = ", ".join(f"`{name}`" for name in linears.weights)
        raise SourceError(
            f"the calibration inputs of {names} hold NaN or infinity",
            hint="an earlier layer overflowed; try `--dtype float32`",
        )


def required_inputs(linears: Linears, scheme: str) -> Inputs:
    """Return the statistics of calibration inputs, or refuse linears that no token reached."""
    if linears.inputs is None or linears.inputs.tokens < 1:
        names = ", ".join(f"`{name}`" for name in linears.weights)
        raise SourceError(
            f"no calibration token reached {names}, which `{scheme}` needs",
            hint="give more calibration text",
        )
    return linears.inputs


def largest_inputs(linears: Linears, scheme: str) -> Tensor:
    """Return the largest magnitude that a calibration token reached in each column."""
    largest_C = required_inputs(linears, scheme).absmax_C
    assert largest_C is not None, "inputs were captured without their largest magnitudes"
    return largest_C


def sampled_inputs(linears: Linears, scheme: str) -> Tensor:
    sample_TC = required_inputs(linears, scheme).sample_TC
    assert sample_TC is not None, "inputs were captured without a sample of tokens"
    return sample_TC.float()


def _is_finite(values: Tensor) -> bool:
    if values.numel() == 0:
        return True
    # The extremes of a tensor are finite exactly when all of it is, and cost no copy of it.
    smallest, largest = torch.aminmax(values)
    return bool(torch.isfinite(smallest) & torch.isfinite(largest))
