"""Which linears of a block read the same input.

Groups are found by running the block once on a short input and comparing the *objects* linears
are given, with every input held alive: an address says nothing, because the allocator hands a
freed one out again within the same pass, and a wrong group is a wrong Hessian that no loss
would betray. Linears of experts are known beforehand: gate and up, then down, of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from qaudit.errors import ModelError
from qaudit.model.experts import ExpertPart, Experts, Sample, expert_parts
from qaudit.model.proven import left_as_gates
from qaudit.model.routes import some

_LARGEST_SHARE_OUTSIDE = 0.05
_EXPERTS = (Experts, Sample)
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
    if sum(outside.values()) > _LARGEST_SHARE_OUTSIDE * sum(sizes.values()):
        largest = max(outside, key=lambda name: outside[name])
        share = sum(outside.values()) / sum(sizes.values())
        why = structure.left.get(largest.removesuffix(".weight"), "no linear layers")
        raise ModelError(
            f"{share:.0%} of {where} would not be quantized, most of it in `{largest}`: {why}",
            hint="a model is audited where at least 95 % of each block are in linear layers",
        )


def find_structure(block: nn.Module, run: Run) -> Structure:
    """Run a block once and see which linears are given the same object.

    Routers and other small gates are left as they are.
    """
    experts = {n: m for n, m in block.named_modules() if isinstance(m, _EXPERTS)}
    seen = _Seen(set(experts))
    with _hooked(block, experts, seen):
        run(block)
    reasons = _left(block, experts, [n for names in seen.readers.values() for n in names])
    parts: dict[tuple[str, ...], ExpertPart] = {}
    readers: list[tuple[str, ...]] = []
    norms: dict[tuple[str, ...], str] = {}
    # A group is where the first of its linears runs that is quantized: a gate may have run before.
    place = {name: number for number, name in enumerate(seen.order)}
    first = {
        key: min((place[name] for name in names if name not in reasons), default=0)
        for key, names in seen.readers.items()
    }
    for key, names in sorted(seen.readers.items(), key=lambda reader: first[reader[0]]):
        if names[0] in experts:
            of_layer = {part.linears: part for part in expert_parts(experts[names[0]], names[0])}
            readers += of_layer
            parts |= of_layer
        elif kept := tuple(name for name in names if name not in reasons):
            readers.append(kept)
            if key in seen.norms:
                norms[kept] = seen.norms[key]
    return Structure(tuple(readers), norms, parts, reasons)


@dataclass(eq=False)
class _Seen:
    """Which linears were given which object, and which norm made it."""

    experts: set[str]
    readers: dict[int, list[str]] = field(default_factory=dict)
    norms: dict[int, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # in which they ran
    alive: list[object] = field(default_factory=list)  # an id is one only while its owner lives

    def read(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Experts stand for themselves: what each reads depends on the routing.
        value = object() if name in self.experts else args[0] if args else kwargs["input"]
        self.alive.append(value)
        self.order.append(name)
        self.readers.setdefault(id(value), []).append(name)

    def made(self, name: str, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if isinstance(out, Tensor):
            self.alive.append(out)
            self.norms[id(out)] = name


@contextmanager
def _hooked(block: nn.Module, experts: Mapping[str, nn.Module], seen: _Seen) -> Iterator[None]:
    handles = []
    for name, module in block.named_modules():
        if _inside(name, experts):
            continue
        if is_linear(module) or name in experts:
            see = partial(seen.read, name)
            handles.append(module.register_forward_pre_hook(see, with_kwargs=True))
        elif isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 1:
            handles.append(module.register_forward_hook(partial(seen.made, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _inside(name: str, experts: Mapping[str, nn.Module]) -> bool:
    return any(name.startswith(f"{outer}.") for outer in experts)


def _left(
    block: nn.Module, experts: Mapping[str, nn.Module], seen: Sequence[str]
) -> dict[str, str]:
    """Return the linears that are left as they are, and why."""
    reasons = {}
    for name, module in block.named_modules():
        if name in experts and seen.count(name) != 1:
            raise ModelError(
                f"experts `{name}` run {seen.count(name)} times when a block runs once",
                hint="please report this model family",
            )
        if is_linear(module) and not _inside(name, experts) and seen.count(name) != 1:
            reasons[name] = f"it runs {seen.count(name)} times when a block runs once"
    matrices = {
        name.removesuffix(".weight"): parameter
        for name, parameter in block.named_parameters()
        if parameter.dim() > 1 and not name.endswith("bias") and not _inside(name, experts)
    }
    linears = {name for name, module in block.named_modules() if is_linear(module)}
    for name in left_as_gates(matrices, experts):
        reasons.setdefault(name, GATE)
    for name in matrices:
        if name not in linears:
            reasons.setdefault(name, "no linear layers")
    return reasons


def notes_of_left(left: Mapping[str, str]) -> tuple[str, ...]:
    """Return notes on the linears of blocks that are left as they are."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name)
    return tuple(f"left as they are: {some(names)}; {why}" for why, names in reasons.items())
