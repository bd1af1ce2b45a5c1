"""Linears of one block that read the same input: what a scheme is given, and what it makes of them.

**What a file holds** of a quantized linear: codes and what turns them back into weights.

A scheme returns a `StoredWeight` beside each dense weight. Dense weights are decoded from it, so
that what is measured is what can be written, and storage is counted from it. A format that needs
other parts (8-bit floats, blocks of llama.cpp) is a further subclass beside the scheme that makes
it; an exporter tells formats apart by the class.

**A whole block**, for a scheme that learns on what the block returns.

A group of linears sees its own product and nothing of what becomes of it. A scheme whose
`calibration` is `Calibration.WHOLE_BLOCK` first sees the block around all of its groups
(`Scheme.train`): what its own, already quantized stream brings to the entrance, and what the block
of the unquantized model returns for the same tokens. It returns what quantizes the groups, which
the engine then calls group by group, each on inputs that went through those before it.

Where a caller has one group and no block, `alone` makes a block of it, which returns the products
of its linears with a sample of tokens.

**Gram matrices** of calibration inputs: X^T X in float32, its products exact where they can be.

A calibrated scheme needs the second moments of what a linear reads, and nothing else of the
tokens. They cost about as much as a forward pass, so precision is chosen with care:

- only the upper block triangle is computed, in at most 8 panels: 9/16 of the work of the
  whole matrix, the same numbers;
- a product of two bf16 numbers is exact in float32. Activations in bf16 therefore go to the
  matrix units in bf16 with float32 sums, which loses nothing that plain float32 would keep:
  on CUDA by asking for a float32 output, on a CPU with bf16 instructions by letting float32
  products run in bf16 (2.1 times as fast as float32 on an AVX512-BF16 core, relative error
  9e-7 against 3e-7 of float32: both are the rounding of the sum).

A scheme that makes up for what quantization did to its inputs asks for the drift too: the moments
of x' - x beside x, where x' is what full precision reads (GPTAQ's matrix). It is no triangle, and
differences of bf16 numbers are not bf16: it costs about twice the Gram matrix.

Given up: sums in double precision. GPTQ damps the diagonal by percents.

Shapes: R output rows, C input columns, G groups of columns, T tokens, B windows, D hidden, S scales
tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

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
    for nothing (`qaudit/model/folds.py`), where a scheme asks for them.
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
    bits: Mapping[str, int] | None = None  # of each linear, where a table has them

    @property
    def columns(self) -> int:
        return next(iter(self.weights.values())).shape[1]

    @property
    def names(self) -> str:
        return ", ".join(f"`{name}`" for name in self.weights)

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


def store_each(
    linears: Linears,
    store: Callable[[Tensor], StoredWeight],
    notes: tuple[str, ...] = (),
    *,
    column_scale_C: Tensor | None = None,
    inputs: Callable[[Tensor], Tensor] | None = None,
) -> Quantized:
    """Store one weight after the other, each by itself."""
    stored = {name: store(weight_RC) for name, weight_RC in linears.widened()}
    return decoded(linears, stored, notes, column_scale_C=column_scale_C, inputs=inputs)


def refuse_nonfinite(*groups: Linears) -> None:
    """Refuse linears with a weight, or inputs, that are not finite numbers."""
    for linears in groups:
        for name, weight_RC in linears.weights.items():
            if not _is_finite(weight_RC):
                raise SourceError(
                    f"the weight of `{name}` holds NaN or infinity",
                    hint="the checkpoint is damaged or its training diverged; try another revision",
                )
        inputs = linears.inputs
        moments = [] if inputs is None else [inputs.gram_CC, inputs.absmean_C, inputs.drift_CC]
        if not all(_is_finite(moment) for moment in moments if moment is not None):
            raise SourceError(
                f"the calibration inputs of {linears.names} hold NaN or infinity",
                hint="an earlier layer overflowed; try `--set dtype=float32`",
            )


def required_inputs(linears: Linears, scheme: str) -> Inputs:
    """Return the statistics of calibration inputs, or refuse linears that no token reached."""
    if linears.inputs is None or linears.inputs.tokens < 1:
        raise SourceError(
            f"no calibration token reached {linears.names}, which `{scheme}` needs",
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


Codes = Literal["integers", "float8", "nv-float4", "mx-float4", "bitsandbytes", "gguf"]


@dataclass(frozen=True)
class CodeLayout:
    """What files hold of a scheme's weights, and how a runtime then computes with them.

    A scheme says it where its stored codes alone do not (`Scheme.layout`); formats of files read
    it, and so know no scheme.
    """

    codes: Codes
    rounds_inputs: bool = False  # the runtime rounds what linears read, as the scheme did
    squares: bool = False  # a scale for squares of weights, in place of one for each row
    kind: str = ""  # what the library of the codes calls their type


INDEX_BITS = 32  # a column's group, as GPTQ files store it under `desc_act`


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """Base of every stored form of one linear's weight."""

    def decode(self) -> Tensor:
        """Return the dense (R, C) weight, in the precision in which it is computed."""
        raise NotImplementedError

    @property
    def nbits(self) -> int:
        """Count the bits of everything that differs from linear to linear."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class IntegerCodes(StoredWeight):
    """Codes on one uniform grid for each group of each row: weight = (code - zero) * scale.

    Scales are in the dtype in which they are stored. With bfloat16 scales every weight is exact
    in float32: a difference of codes has 8 bits and a scale has 8.
    """

    codes_RC: Tensor  # uint8, 0 to 2^bits - 1
    scales_RG: Tensor
    zeros_RG: Tensor | None  # uint8; None: symmetric, 2^(bits - 1) everywhere
    bits: int
    group: int  # columns of a full group; the last group can be smaller
    group_of_C: Tensor | None = None  # where a column's group is not its number over `group`

    def decode(self) -> Tensor:
        wide = torch.promote_types(self.scales_RG.dtype, torch.float32)
        weight_RC, scales_RG = self.codes_RC.to(wide), self.scales_RG.to(wide)
        zeros_RG = torch.full_like(scales_RG, 2 ** (self.bits - 1))
        if self.zeros_RG is not None:
            zeros_RG = self.zeros_RG.to(wide)
        if self.group_of_C is not None:
            zeros_RC = zeros_RG.index_select(1, self.group_of_C)
            return weight_RC.sub_(zeros_RC).mul_(scales_RG.index_select(1, self.group_of_C))
        columns = weight_RC.shape[1]
        full = columns - columns % self.group
        for start, stop in ((0, full), (full, columns)):
            if start < stop:  # full groups at once, then the smaller one at the end
                part_RGK = weight_RC[:, start:stop].unflatten(
                    1, (-1, min(self.group, stop - start))
                )
                groups = slice(start // self.group, -(-stop // self.group))
                part_RGK.sub_(zeros_RG[:, groups, None]).mul_(scales_RG[:, groups, None])
        return weight_RC

    @property
    def nbits(self) -> int:
        per_group = 8 * self.scales_RG.element_size() + (0 if self.zeros_RG is None else self.bits)
        index = 0 if self.group_of_C is None else INDEX_BITS * len(self.group_of_C)
        return self.codes_RC.numel() * self.bits + self.scales_RG.numel() * per_group + index


STEP_TOKENS = 512
"""Tokens of a mini-batch, unless a single window is longer."""

Quantize = Callable[[Linears], Quantized]
"""Quantize a group of the block that was learned on."""


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Some windows at the entrance of a block, and what the unquantized model makes of them."""

    hidden_BTD: Tensor  # in the scheme's own stream
    target_BTD: Tensor  # behind the block of the unquantized model, in the unquantized stream
    valid_BT: Tensor  # which positions hold a token of a window


@dataclass(frozen=True, eq=False)
class WholeBlock:
    """A block with full-precision weights, its mini-batches, and what runs it."""

    groups: tuple[Linears, ...]  # without statistics
    batches: Sequence[MiniBatch]  # read when they are asked for, the same in every run
    calibrated: Callable[[], tuple[Linears, ...]]  # with statistics: another pass of calibration
    # Run the block as if groups were installed; gradients reach their weights, forwards and inputs,
    # where they are enabled: the engine disables them around `train`.
    run: Callable[[Tensor, Iterable[Quantized]], Tensor]


def alone(linears: Linears, scheme: str) -> WholeBlock:
    """Return a block of one group, whose output is the products with a sample of tokens."""
    sample_1TC = sampled_inputs(linears, scheme)[None]
    plain = {name: weight.detach().contiguous() for name, weight in linears.weights.items()}

    def run(x: Tensor, quantized: Iterable[Quantized]) -> Tensor:
        change, weights = None, {**plain}
        forwards: dict[str, Callable[[Tensor], Tensor]] = {}
        for part in quantized:
            change = part.inputs
            weights |= part.weights
            forwards |= part.forwards
        products = {name: partial(_product, weight_RC) for name, weight_RC in weights.items()}
        read = x if change is None else change(x)
        return torch.cat([forward(read) for forward in (products | forwards).values()], -1)

    valid_BT = torch.ones(sample_1TC.shape[:2], dtype=torch.bool)
    batch = MiniBatch(sample_1TC, run(sample_1TC, ()), valid_BT)
    return WholeBlock(groups=(linears,), batches=(batch,), calibrated=lambda: (linears,), run=run)


def _product(weight_RC: Tensor, x: Tensor) -> Tensor:
    return x @ weight_RC.to(x).T


SAMPLE = 256  # tokens at least, where there are as many
PANELS = 8
SMALLEST_PANEL = 64


class InputsAccumulator:
    """Second-order statistics of the inputs of a group of linears, summed batch by batch."""

    def __init__(self, columns: int, device: torch.device | str = "cpu") -> None:
        self._gram_CC = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self._magnitude_C = torch.zeros(columns, dtype=torch.float64, device=device)
        self._largest_C = torch.zeros(columns, dtype=torch.float32, device=device)
        self._drift_CC: Tensor | None = None
        self._tokens = 0
        self._sample: list[Tensor] = []
        self._stride = 1  # of the tokens that are in the sample
        self._panel = max(SMALLEST_PANEL, -(-columns // PANELS))

    def add(self, x: Tensor, full: Tensor | None = None) -> None:
        """Add the tokens of a batch, and what they are in full precision where that counts."""
        x_TC = x.detach().reshape(-1, x.shape[-1])
        # Every n-th token, n doubled whenever twice as many are there as needed.
        self._sample.append(x_TC[-self._tokens % self._stride :: self._stride].clone())
        while sum(map(len, self._sample)) >= 2 * SAMPLE:
            self._sample = [torch.cat(self._sample)[::2].clone()]
            self._stride *= 2
        self._tokens += len(x_TC)
        if not len(x_TC):
            return
        magnitude_TC = x_TC.abs()
        self._magnitude_C += magnitude_TC.sum(0, dtype=self._gram_CC.dtype)
        self._largest_C = torch.maximum(self._largest_C, magnitude_TC.amax(0).float())
        # X^T X, to the panels of the upper block triangle.
        in_half = x_TC.dtype in (torch.bfloat16, torch.float16) and x_TC.is_cuda
        with _bf16_products(x_TC):
            wide_TC = x_TC if in_half else x_TC.float()
            for a, b in _panels(len(self._gram_CC), self._panel):
                rows_TB, panel_BC = wide_TC[:, a:b].T, self._gram_CC[a:b, a:]
                if in_half:
                    panel_BC += torch.mm(rows_TB, wide_TC[:, a:], out_dtype=torch.float32)
                else:
                    panel_BC.addmm_(rows_TB, wide_TC[:, a:])
        if full is not None:
            if self._drift_CC is None:
                self._drift_CC = torch.zeros_like(self._gram_CC)
            drift_TC = full.detach().reshape(x_TC.shape).float() - x_TC.float()
            self._drift_CC.addmm_(drift_TC.T, x_TC.float())

    def result(self) -> Inputs:
        """Return the statistics so far, as copies that later batches do not touch."""
        gram_CC = torch.triu(self._gram_CC)
        gram_CC += torch.triu(gram_CC, 1).T
        return Inputs(
            gram_CC,
            (self._magnitude_C / max(self._tokens, 1)).float(),
            self._tokens,
            self._largest_C.clone(),
            None if self._drift_CC is None else self._drift_CC.clone(),
            torch.cat(self._sample) if self._sample else None,
        )


def _panels(columns: int, panel: int) -> Iterator[tuple[int, int]]:
    for start in range(0, columns, panel):
        yield start, min(start + panel, columns)


@contextmanager
def _bf16_products(x_TC: Tensor) -> Iterator[None]:
    """Let a CPU multiply float32 tensors that hold bf16 numbers as the bf16 numbers they are."""
    settings: Any = getattr(torch.backends.mkldnn, "matmul", None)  # torch 2.8 has none
    exact = x_TC.dtype == torch.bfloat16 and x_TC.device.type == "cpu"
    if settings is None or not (exact and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        yield
        return
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def quadratic_forms(error_SRC: Tensor, upper_CC: Tensor) -> Tensor:
    """Return the sums over rows of e U e^T, skipping the blocks below the diagonal of U."""
    columns, error_NC = len(upper_CC), error_SRC.flatten(0, 1)
    panel = max(SMALLEST_PANEL, -(-columns // PANELS))
    total_S = error_SRC.new_zeros(len(error_SRC))
    for start, stop in _panels(columns, panel):
        product_NB = error_NC[:, :stop] @ upper_CC[:stop, start:stop]
        product_NB.mul_(error_NC[:, start:stop])
        total_S += product_NB.view(len(total_S), -1).sum(1)
    return total_S


@contextmanager
def tf32_products(weight_RC: Tensor) -> Iterator[None]:
    """Let a GPU multiply float32 with 10 bits of mantissa: it chooses a ratio, and rounds nothing.

    `python -m benchmarks.tf32` shows that no chosen ratio changes.
    """
    settings = torch.backends.cuda.matmul
    try:
        before = settings.allow_tf32
    except RuntimeError:  # torch refuses to read this after `fp32_precision` was set
        before = True
    if weight_RC.device.type != "cuda" or before:
        yield
        return
    settings.allow_tf32 = True
    try:
        yield
    finally:
        settings.allow_tf32 = False
