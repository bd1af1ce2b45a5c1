"""AutoRound (Cheng et al., 2309.05516), by its own library.

What is added to each weight before it is rounded, and which share of its range a group keeps, are
learned on the output of a whole block: by signed gradient steps of a rate that falls to zero, eight
windows of calibration text each, towards what the unquantized model returns. Of all steps the one
with the smallest error counts. The block runs on what its own quantized predecessors bring to it.

Given to the library are linears alone; the engine runs what is around them, in the dtype of the
model. The linears compute in float32, where the library would cast all of the block to bfloat16.
Its other settings are its own: rates, eight windows a step, seed 42, each block by itself.
Symmetric grids reach from -2^(bits-1) to 2^(bits-1) - 1 with a scale of either sign. Scales are
stored in bfloat16, as those of `rtn`; the library's own are in float16.

What the library sets for the whole process is put back, and so is what it replaces in transformers
when it is imported: other schemes of the same scan compute as they do without it.

Shapes: B windows, T tokens of each, D hidden, R rows, C columns, G groups of columns.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from qaudit.core.grid import group_notes, group_size
from qaudit.core.linears import IntegerCodes, Linears, Quantized, alone, decoded, refuse_nonfinite
from qaudit.core.scheme import Calibration, Scheme, limited
from qaudit.errors import MachineError, SchemeError, SourceError
from qaudit.support.lazy import Tensor, torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from qaudit.core.linears import MiniBatch, Quantize, WholeBlock

SIDE = 32  # the library leaves other linears as they are
WINDOWS = 8  # of a step
SEED = 42
_BLOCK = "layers.0"
_IGNORED = -100  # marks a position that counts in no loss

_REPLACED = (
    "logging:Logger",
    "torch:Tensor",
    "transformers.core_model_loading:Transpose",
    "transformers.integrations.finegrained_fp8:Fp8Dequantize",
    "transformers.modeling_utils:PreTrainedModel",
    "transformers.models.auto.modeling_auto:AutoModelForCausalLM",
    "transformers.quantizers.quantizer_compressed_tensors:CompressedTensorsHfQuantizer",
)
"""Classes of which the library replaces methods when it is imported."""


@dataclass(frozen=True, kw_only=True)
class AutoRound(Scheme):
    """Learn roundings and ranges on the output of a block (AutoRound)."""

    name: ClassVar[str] = "autoround"
    calibration: ClassVar[Calibration] = Calibration.WHOLE_BLOCK
    any_model: ClassVar[bool] = False
    extra: ClassVar[tuple[str, str] | None] = ("auto-round", "qaudit-autoround")

    bits: int
    group: int = 128
    sym: bool = True
    iters: int = limited(
        200,
        (lambda n: 1 <= n <= 100_000, "{} steps are out of range", "use iters=1 to 100000"),
    )
    scale_dtype: str = "bf16"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits == 8 and not self.sym:
            raise SchemeError(
                "AutoRound has no 8 bits with zero points", hint="use sym=true, or 7 bits"
            )

    @property
    def learning_steps(self) -> int:
        return WINDOWS * self.iters  # windows one by one, of which short ones share a mini-batch

    def quantize(self, linears: Linears) -> Quantized:
        refuse_nonfinite(linears)
        return self.train(alone(linears, self.name))(linears)

    def train(self, block: WholeBlock) -> Quantize:
        for linears in block.groups:
            refuse_nonfinite(linears)
            for name, (rows, columns) in ((n, w.shape) for n, w in linears.weights.items()):
                if rows % SIDE or columns % SIDE:
                    raise SourceError(
                        f"`{name}` is {rows} x {columns}, and AutoRound leaves linears as they are "
                        f"whose sides are no multiples of {SIDE}",
                        hint="leave `autoround` out",
                    )
        library, samples = _library(), _Samples.of(block.batches)
        with _undone(library):
            layers = self._tuned(library, block, samples)
        stored = {name: self._codes(layer) for name, layer in layers.items()}

        def quantize(linears: Linears) -> Quantized:
            columns = next(iter(linears.weights.values())).shape[1]
            mine = {name: stored[name] for name in linears.weights}
            return decoded(linears, mine, group_notes(columns, self.group))

        return quantize

    def _tuned(self, library: Any, block: WholeBlock, samples: _Samples) -> Mapping[str, Any]:
        from torch import nn

        tuned = _tunable(block, samples.rows)
        model: Any = nn.Module()
        model.layers, model.dtype = nn.ModuleList([tuned]), torch.float32
        model.config = SimpleNamespace(model_type="", architectures=[])
        windows = max(n for n in (1, 2, 4, WINDOWS) if n <= samples.rows)
        orchestrator = library.AutoRound(
            model,
            tokenizer="",  # a placeholder: there is no text to read
            alg_configs=library.SignRoundConfig(
                bits=self.bits,
                group_size=self.group,
                sym=self.sym,
                iters=self.iters,
                gradient_accumulate_steps=WINDOWS // windows,
            ),
            scale_dtype={"bf16": "bf16", "float32": "fp32"}[self.scale_dtype],
            batch_size=windows,
            nsamples=len(samples.hidden),
            device_map=str(samples.hidden[0].device),
            seed=SEED,
            amp=False,
            enable_torch_compile=False,
            low_cpu_mem_usage=False,
        )
        orchestrator.post_init()
        place = library.algorithms.composer.BlockContext(
            model=model, block_names=[_BLOCK], block_name=_BLOCK, block_index=0, block_cnt=1
        )
        orchestrator.alg_composer.block_quantizer.quantize_block(
            tuned, samples.hidden, {}, samples.target, None, place, input_ids=samples.marks
        )
        return dict(zip(_weights(block), tuned.linears, strict=True))

    def _codes(self, layer: Any) -> IntegerCodes:
        """Return the library's codes of a linear: its weights are codes times scales exactly."""
        weight_RC, scales_RG = layer.weight.detach(), layer.scale.to(layer.weight.device)
        size = group_size(weight_RC.shape[1], self.group)
        zeros_RG = layer.zp.to(scales_RG.device) if isinstance(layer.zp, torch.Tensor) else None

        def wide(values_RG: Tensor) -> Tensor:
            return values_RG.float().repeat_interleave(size, 1)[:, : weight_RC.shape[1]]

        codes_RC = torch.round(weight_RC / wide(scales_RG))
        codes_RC += 2 ** (self.bits - 1) if zeros_RG is None else wide(zeros_RG)
        zeros = None if zeros_RG is None else zeros_RG.to(torch.uint8)
        return IntegerCodes(codes_RC.to(torch.uint8), scales_RG, zeros, self.bits, size)


@dataclass(frozen=True, eq=False)
class _Samples:
    """Windows of calibration text one by one, all of one width."""

    hidden: list[Tensor]  # (1, T, D)
    target: list[Tensor]
    marks: list[Tensor]  # (1, T)
    rows: int  # of a mini-batch in that width

    @classmethod
    def of(cls, batches: Sequence[MiniBatch]) -> _Samples:
        from torch.nn.functional import pad

        samples = cls([], [], [], len(batches[0].hidden_BTD))
        width = batches[0].hidden_BTD.shape[1]
        for batch in batches:
            if not bool(torch.isfinite(batch.hidden_BTD[batch.valid_BT]).all()):
                raise SourceError(
                    "the calibration inputs of a block hold NaN or infinity",
                    hint="an earlier layer overflowed; try `--set dtype=float32`",
                )
            behind = width - batch.hidden_BTD.shape[1]
            marks_BT = torch.where(batch.valid_BT, 0, _IGNORED)
            samples.hidden.extend(pad(batch.hidden_BTD, (0, 0, 0, behind)).split(1))
            samples.target.extend(pad(batch.target_BTD, (0, 0, 0, behind)).split(1))
            samples.marks.extend(pad(marks_BT, (0, behind), value=_IGNORED).split(1))
        return samples


def _weights(block: WholeBlock) -> dict[str, Tensor]:
    return {name: weight for linears in block.groups for name, weight in linears.weights.items()}


def _tunable(block: WholeBlock, rows: int) -> Any:
    """Return the block as a module of nothing but its linears, for any number of windows."""
    from torch import nn
    from torch.nn.functional import pad

    class Tunable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList()
            for weight_RC in _weights(block).values():
                rows, columns = weight_RC.shape
                linear = nn.Linear(columns, rows, bias=False, device="meta")
                copied = weight_RC.detach().to(torch.float32, copy=True).contiguous()
                linear.weight = nn.Parameter(copied, requires_grad=False)
                self.linears.append(linear)

        def forward(self, hidden_states: Tensor) -> Tensor:
            products = dict(zip(_weights(block), map(_product, self.linears), strict=True))
            quantized = [
                Quantized(
                    group.weights, 0, forwards={name: products[name] for name in group.weights}
                )
                for group in block.groups
            ]
            parts = [
                block.run(pad(part_BTD, (0, 0, 0, 0, 0, rows - len(part_BTD))), quantized)
                for part_BTD in hidden_states.split(rows)
            ]
            return torch.cat(parts)[: len(hidden_states)]

    return Tunable()


def _product(linear: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x.float()).to(x.dtype)


@contextmanager
def _undone(library: Any) -> Iterator[None]:
    """Put back what the library sets for the whole process, once it has done its work."""
    import numpy as np

    log, environment = logging.getLogger("autoround"), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    level, python, numpy = log.level, random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count())
    printed = torch._tensor_str.printoptions()
    with printed, torch.random.fork_rng(devices), torch.enable_grad():
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)
            random.setstate(python)
            np.random.set_state(numpy)
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
            if environment is not None:
                os.environ["CUBLAS_WORKSPACE_CONFIG"] = environment
            # It keeps the model until it is given another.
            library.context.model.ModelContext.reset_context()
            library.context.compress.CompressContext.reset_context()


@cache
def _library() -> Any:
    """Import AutoRound, and put back what it replaces in other libraries."""
    try:
        with _unreplaced():
            import auto_round
            import auto_round.algorithms.composer
            import auto_round.context.compress
            import auto_round.context.model
    except ImportError as error:
        raise MachineError(
            f"auto-round cannot be imported: {error}",
            hint="pip install 'qaudit-autoround', or leave autoround out",
        ) from error
    return auto_round


@contextmanager
def _unreplaced() -> Iterator[None]:
    # By name: this module has no other business with these libraries. The library itself needs what
    # it adds to `Logger`, and transformers has a `warning_once` of its own there.
    classes = [pkgutil.resolve_name(name) for name in _REPLACED]
    kinds = pkgutil.resolve_name("transformers.modeling_rope_utils:ROPE_INIT_FUNCTIONS")
    before, kinds_before = [dict(vars(kind)) for kind in classes], dict(kinds)
    try:
        yield
    finally:
        for kind, was in zip(classes, before, strict=True):
            for name, value in dict(vars(kind)).items():
                if name not in was and kind is not logging.Logger:
                    delattr(kind, name)
                elif name in was and value is not was[name]:
                    setattr(kind, name, was[name])
        for name in kinds.keys() - kinds_before.keys():
            del kinds[name]
