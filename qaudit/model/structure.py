"""Which linears of a block read the same input.

Groups are found by running the block once on a short input and comparing the *objects* linears
are given, with every input held alive: an address says nothing, because the allocator hands a
freed one out again within the same pass, and a wrong group is a wrong Hessian that no loss
would betray. Linears of experts are known beforehand: gate and up, then down, of each.

Where a scale per input column can hide, proved rather than believed.

A fold is a place where a scale per input column can hide: columns of the group multiplied by
s, rows of whatever precedes it divided by s. Candidates are generous guesses from structure
alone: a norm whose output is the group's input, and every slice of an earlier linear that is as
wide as the input, or as wide as the key-value heads, each then shared by its query heads.
Nothing is believed of them; each is proved on the unquantized block in fp32. Post-norm models
such as OLMo 2 lose their norm folds here without being named, and gated MLPs keep theirs.

The proof scales by random factors in [1/2, 2] and compares two distances from the block's own
output: with columns and rows scaled, and, as a control, with the columns alone. A true fold
leaves rounding, 1e-5 of the control or less; a false one about as much as the control. The line
is drawn at 1e-3. If the control moves nothing, nothing can be proved and the fold is dropped.

Which outputs of a block's linears may be rotated for nothing, proved rather than believed.

QuaRot's names: R1 rotates the residual. What writes to it (o, down) is then rotated in its rows,
and what reads it has the norm's weight in its columns. R2 rotates each head's values: rows of v,
columns of o. Whether a block allows them is tried on an unquantized fp32 copy, on a short batch:
it has to give the rotated output (R1), or the same output (R2), where rotating one side alone does
not. Norms behind sublayers (OLMo 2) and norms that subtract a mean have no free R1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from qaudit.core.linears import Rows
from qaudit.core.rotation import rotate, rotate_rows
from qaudit.errors import ModelError
from qaudit.model.experts import ExpertPart, Experts, Sample, expert_parts
from qaudit.model.links import beside
from qaudit.model.proven import left_as_gates
from qaudit.model.routes import some

_LARGEST_SHARE_OUTSIDE = 0.05
GATE = "routers and small gates, which toolchains leave"

Run = Callable[[nn.Module], Tensor]
"""Send a short input through a block and return what comes out."""


@dataclass(frozen=True, eq=False)
class Structure:
    """What one short pass shows of a block: which linears read what, and which norm made it."""

    readers: tuple[tuple[str, ...], ...]  # linears by common input, in order of execution
    norms: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    experts: Mapping[tuple[str, ...], ExpertPart] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)  # linears left as they are, and why

    def sampled(self, linears: tuple[str, ...]) -> tuple[str, ...]:
        """Return the same linears of the first expert of a layer, where they are an expert's."""
        part = self.experts.get(linears)
        if part is None:
            return linears
        before = len(f"{part.module}.{part.index}")
        return tuple(f"{part.module}.0{name[before:]}" for name in linears)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies by a matrix we quantize."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear, which stores its matrix as (C, R)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def weight_of(module: nn.Module) -> Tensor:
    """Return a linear's matrix as (R, C), a view."""
    weight = module.get_parameter("weight").data
    return weight.t() if is_transposed(module) else weight


def must_be_linear(block: nn.Module, where: str, structure: Structure) -> None:
    """Refuse a block that keeps much of its weight where no scheme would see it."""
    covered = {f"{name}.weight" for names in structure.readers for name in names}
    covered |= {f"{name}.weight" for name, why in structure.left.items() if why == GATE}
    sizes = {name: p.numel() for name, p in block.named_parameters() if p.dim() > 1}
    outside = {name: size for name, size in sizes.items() if name not in covered}
    share = sum(outside.values()) / max(sum(sizes.values()), 1)
    if share > _LARGEST_SHARE_OUTSIDE:
        largest = max(outside, key=lambda name: outside[name])
        why = structure.left.get(largest.removesuffix(".weight"), "no linear layers")
        raise ModelError(
            f"{share:.0%} of {where} would not be quantized, most of it in `{largest}`: {why}",
            hint="a model is audited where at least 95 % of each block are in linear layers",
        )


def find_structure(block: nn.Module, run: Run) -> Structure:
    """Run a block once and see which linears are given the same object.

    Routers and other small gates are left as they are.
    """
    experts = {n: m for n, m in block.named_modules() if isinstance(m, (Experts, Sample))}
    readers_of: dict[int, list[str]] = {}  # linears by the id of what they were given
    norm_of: dict[int, str] = {}  # what made it
    place: dict[str, int] = {}  # in which linears ran last
    alive: list[object] = []  # an id is one only while its owner lives

    def read(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Experts stand for themselves: what each reads depends on the routing.
        value = object() if name in experts else args[0] if args else kwargs["input"]
        alive.append(value)
        place[name] = len(alive)
        readers_of.setdefault(id(value), []).append(name)

    def made(name: str, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if isinstance(out, Tensor):
            alive.append(out)
            norm_of[id(out)] = name

    inside = tuple(f"{outer}." for outer in experts)
    modules = {n: m for n, m in block.named_modules() if not n.startswith(inside)}
    with ExitStack() as hooks:
        for name, module in modules.items():
            if is_linear(module) or name in experts:
                see = partial(read, name)
                hooks.enter_context(module.register_forward_pre_hook(see, with_kwargs=True))
            elif isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 1:
                hooks.enter_context(module.register_forward_hook(partial(made, name)))
        run(block)
    reasons = _left(block, modules, experts, list(chain(*readers_of.values())))
    parts: dict[tuple[str, ...], ExpertPart] = {}
    readers: list[tuple[str, ...]] = []
    norms: dict[tuple[str, ...], str] = {}
    # A group is where the first of its linears runs that is quantized: a gate may have run before.
    for key, names in sorted(
        readers_of.items(),
        key=lambda reader: min((place[n] for n in reader[1] if n not in reasons), default=0),
    ):
        if names[0] in experts:
            of_layer = {part.linears: part for part in expert_parts(experts[names[0]], names[0])}
            readers += of_layer
            parts |= of_layer
        elif kept := tuple(name for name in names if name not in reasons):
            readers.append(kept)
            if key in norm_of:
                norms[kept] = norm_of[key]
    return Structure(tuple(readers), norms, parts, reasons)


def _left(
    block: nn.Module, modules: Mapping[str, nn.Module], experts: Collection[str], runs: list[str]
) -> dict[str, str]:
    """Return the linears that are left as they are, and why; `modules` are outside of experts."""
    reasons = {}
    for name, module in modules.items():
        again = f"{runs.count(name)} times when a block runs once"
        if name in experts and runs.count(name) != 1:
            hint = "please report this model family"
            raise ModelError(f"experts `{name}` run {again}", hint=hint)
        if is_linear(module) and runs.count(name) != 1:
            reasons[name] = f"it runs {again}"
    matrices = [
        name.removesuffix(".weight")
        for name, parameter in block.named_parameters()
        if parameter.dim() > 1 and not name.endswith("bias")
        if not name.startswith(tuple(f"{outer}." for outer in experts))
    ]
    for name in left_as_gates(matrices, experts):
        reasons.setdefault(name, GATE)
    for name in matrices:
        if name not in modules or not is_linear(modules[name]):
            reasons.setdefault(name, "no linear layers")
    return reasons


def notes_of_left(left: Mapping[str, str]) -> tuple[str, ...]:
    """Return notes on the linears of blocks that are left as they are."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name)
    return tuple(f"left as they are: {some(names)}; {why}" for why, names in reasons.items())


TOLERANCE = 1e-3
"""The largest share of what one side alone moves that both sides may."""


@dataclass(frozen=True, eq=False)
class Fold:
    """A place for a group's input scale: the rows that would be divided by it."""

    linears: tuple[str, ...]  # whose columns would be multiplied
    source: str
    offset: int  # first row of the source
    index_C: Tensor  # column -> row after the offset
    one_plus: bool = False  # the source is a norm that multiplies by (1 + weight)

    @property
    def label(self) -> str:
        return f"{self.source} -> {', '.join(self.linears)}"


@dataclass(frozen=True)
class Heads:
    """Attention heads, and how many channels each has."""

    query: int
    key_value: int
    width: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        config = config.get_text_config()
        try:
            query = int(getattr(config, "num_attention_heads", 0) or 0)
            key_value = int(getattr(config, "num_key_value_heads", None) or query)
            width = getattr(config, "head_dim", None)
        except (RuntimeError, ValueError):  # they vary from layer to layer
            return cls(0, 0, 0)
        if width is None and query:
            width = config.hidden_size // query
        return cls(query, key_value, int(width or 0))


def candidates(block: nn.Module, structure: Structure, heads: Heads) -> Iterator[Fold]:
    """Yield every place that could absorb a group's input scale, likely ones first."""
    earlier: list[str] = []
    for linears in structure.readers:
        columns = weight_of(block.get_submodule(linears[0])).shape[1]
        if (part := structure.experts.get(linears)) is not None:
            if part.is_down:  # into its `up_proj`: nothing else is tried
                yield Fold(part.linears, part.before[-1], 0, torch.arange(columns))
            continue
        norm = structure.norms.get(linears)
        if norm is not None and len(block.get_submodule(norm).get_parameter("weight")) == columns:
            for one_plus in (False, True):
                yield Fold(linears, norm, 0, torch.arange(columns), one_plus)
        # Maps from input columns to source rows: one to one, or shared by query heads.
        maps = [torch.arange(columns)]
        shared = heads.query > heads.key_value > 0 and heads.query % heads.key_value == 0
        if shared and columns == heads.query * heads.width:
            head_C, within_C = maps[0] // heads.width, maps[0] % heads.width
            maps.append(head_C // (heads.query // heads.key_value) * heads.width + within_C)
        for source in reversed(earlier):
            rows = weight_of(block.get_submodule(source)).shape[0]
            for index_C in maps:
                width = int(index_C.max()) + 1
                for offset in sorted({0, rows - width}, reverse=True) if width <= rows else ():
                    yield Fold(linears, source, offset, index_C)
        earlier += linears


@contextmanager
def changed(block: nn.Module) -> Iterator[Callable[[str], nn.Module]]:
    """Give modules whose parameters may be changed until the end of a `with` body."""
    before: dict[nn.Parameter, Tensor] = {}

    def change(name: str) -> nn.Module:
        module = block.get_submodule(name)
        for parameter in module.parameters(recurse=False):
            before.setdefault(parameter, parameter.data.clone())
        return module

    try:
        yield change
    finally:
        for parameter, data in before.items():
            parameter.data.copy_(data)


def true_folds(block: nn.Module, run: Run, folds: Sequence[Fold]) -> tuple[Fold, ...]:
    """Return the first fold of each group that leaves the block's output as it is."""
    proved: dict[tuple[str, ...], Fold] = {}
    out = run(block)
    for fold in folds:
        if fold.linears not in proved and leaves_unchanged(block, run, fold, out):
            proved[fold.linears] = fold
    return tuple(proved.values())


def leaves_unchanged(block: nn.Module, run: Run, fold: Fold, out: Tensor) -> bool:
    """Prove a fold on an unquantized fp32 block that gives `out`.

    One at a time: beside a fold that moves much, a false one that moves little would pass.
    """
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp2(torch.rand(int(fold.index_C.max()) + 1, generator=generator) * 2 - 1)
    with changed(block) as change:
        for name in fold.linears:
            weight_RC = weight_of(change(name))
            weight_RC.mul_(scale[fold.index_C].to(weight_RC.device))
        control = float((run(block) - out).abs().max())
        source = change(fold.source)
        rows = slice(fold.offset, fold.offset + len(scale))
        weight = weight_of(source) if is_linear(source) else source.get_parameter("weight").data
        scale = scale.to(weight.device)
        if fold.one_plus:
            weight[rows] = (1 + weight[rows]) / scale - 1
        else:
            weight[rows] /= scale[:, None] if weight.dim() == 2 else scale
        if getattr(source, "bias", None) is not None:
            source.get_parameter("bias").data[rows] /= scale
        distance = float((run(block) - out).abs().max())
    return control > 0 and distance <= TOLERANCE * control


def residual_rotations(
    block: nn.Module,
    run: Callable[[Tensor], Tensor],
    hidden_BTD: Tensor,
    readers: Iterable[tuple[str, ...]],
    folds: Iterable[Fold],
) -> dict[str, Rows]:
    """Return the linears of an fp32 block that write to a residual which can be rotated (R1)."""
    norms = [fold for fold in folds if not is_linear(block.get_submodule(fold.source))]
    reading = {name for fold in norms for name in fold.linears}
    writers = [name for names in readers for name in names if name not in reading]
    whole = Rows(0, hidden_BTD.shape[-1], hidden_BTD.shape[-1])
    if not norms or any(len(weight_of(block.get_submodule(n))) != whole.stop for n in writers):
        return {}
    out_BTD, turned_BTD = rotate(run(hidden_BTD)), rotate(hidden_BTD)
    with changed(block) as change:
        for fold in norms:
            weight = change(fold.source).get_parameter("weight").data
            for name in fold.linears:
                reader = weight_of(change(name))
                reader.copy_(rotate(reader * (1 + weight if fold.one_plus else weight)))
            weight.fill_(0 if fold.one_plus else 1)
        control = float((run(turned_BTD) - out_BTD).abs().max())
        for name in writers:
            _turn_rows(change(name), whole)
        distance = float((run(turned_BTD) - out_BTD).abs().max())
    return dict.fromkeys(writers, whole) if control > 0 and distance <= TOLERANCE * control else {}


def value_rotations(
    block: nn.Module, run: Run, folds: Iterable[Fold], head: int
) -> dict[str, Rows]:
    """Return the rows of an fp32 block's values, which can be rotated head by head (R2)."""
    out = run(block)
    for fold in folds:
        if head < 2 or not is_linear(block.get_submodule(fold.source)):
            continue
        rows = Rows(fold.offset, fold.offset + int(fold.index_C.max()) + 1, head)
        if (rows.stop - rows.start) % head or len(fold.index_C) % head:
            continue
        with changed(block) as change:
            for name in fold.linears:
                reader = weight_of(change(name))
                reader.copy_(rotate(reader.reshape(-1, head)).reshape(reader.shape))
            control = float((run(block) - out).abs().max())
            _turn_rows(change(fold.source), rows)
            distance = float((run(block) - out).abs().max())
        if control > 0 and distance <= TOLERANCE * control:
            return {fold.source: rows}
    return {}


def all_numbers(out_BTD: Tensor) -> Tensor:
    """Return all numbers of what a block returns: a later block reads what is beside it."""
    tensors = beside(out_BTD).values()
    floats = [tensor.flatten() for tensor in tensors if tensor.is_floating_point()]
    return torch.cat([out_BTD.flatten(), *floats]) if floats else out_BTD


def _turn_rows(linear: nn.Module, rows: Rows) -> None:
    weight_RC = weight_of(linear)
    weight_RC.copy_(rotate_rows(weight_RC, rows))
    bias = getattr(linear, "bias", None)
    if bias is not None:
        bias.data.copy_(rotate_rows(bias.data[:, None], rows)[:, 0])
