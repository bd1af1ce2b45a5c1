"""Experts as linears: `unfuse(block)` puts them in place of fused modules, and copies no weight.

`transformers` keeps all experts of a layer in one 3-D parameter. Here each expert has the
`nn.Linear`s that its matrices are, views of that parameter, and reads the tokens routed to it.
Classes under `use_experts_implementation` say by their flags how matrices are laid out; three
others are known by name. A token's experts are added as the library's default, `grouped_mm`, does,
bit for bit on a CPU; its `eager` loop adds in bfloat16 and is further from float64.

Shapes: N tokens, K experts of a token, P = N x K pairs, T tokens of one expert, H hidden, I inner,
R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

_BY_NAME = ("DbrxExperts", "Llama4TextExperts", "LongcatFlashExperts")
_FUSED = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertPart:
    """Linears of one expert that read the same: gate and up, or down."""

    module: str  # all experts of the layer
    index: int
    linears: tuple[str, ...]
    is_down: bool

    @property
    def before(self) -> tuple[str, ...]:
        """Return the linears that make what these read."""
        if not self.is_down:
            return ()
        expert = self.linears[0].rpartition(".")[0]
        return f"{expert}.gate_proj", f"{expert}.up_proj"


@dataclass(frozen=True, eq=False)
class Routed:
    """What the experts of a layer are given for a batch, and which rows of it each reads."""

    hidden_NH: Tensor
    rows: tuple[Tensor, ...]  # of each expert: its rows of `hidden_NH`
    tokens: tuple[Tensor, ...]  # of each expert: which tokens of the batch these are
    everyone: Tensor | None  # rows of all tokens; none where experts are given others' as zeros

    def only(self, valid_N: Tensor) -> Routed:
        """Return the same without the tokens that are not valid, which are padding."""
        if bool(valid_N.all()):
            return self
        everyone = None if self.everyone is None else valid_N.nonzero().squeeze(1)
        valid = [valid_N.to(tokens.device)[tokens] for tokens in self.tokens]
        rows, tokens = (
            tuple(places[its] for places, its in zip(of_experts, valid, strict=True))
            for of_experts in (self.rows, self.tokens)
        )
        return replace(self, rows=rows, tokens=tokens, everyone=everyone)


class Expert(nn.Module):
    """One expert: its linears, with what is done between them."""

    def __init__(self, source: nn.Module, index: int, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._source, self._index = (source,), index  # in a tuple: its parameters are not ours
        for name, weight_RC in weights.items():
            rows, columns = weight_RC.shape
            linear = nn.Linear(columns, rows, bias=False, device="meta", dtype=weight_RC.dtype)
            linear.weight = nn.Parameter(weight_RC, requires_grad=False)
            self.add_module(name, linear)

    def forward(self, x_TH: Tensor) -> Any:
        source: Any = self._source[0]
        out_TH = self.get_submodule("down_proj")(self.inner(x_TH)) + self._bias("down_proj_bias")
        if getattr(source, "has_post_expert_norm", False):
            return source.post_expert_norm(out_TH)
        return out_TH

    def inner(self, x_TH: Tensor) -> Any:
        """Return the input of `down_proj`."""
        source: Any = self._source[0]
        act: Any = getattr(source, "act_fn", None)
        up_TI = self.get_submodule("up_proj")(x_TH)
        if "gate_proj" not in self._modules:
            return act(up_TI + self._bias("up_proj_bias"))
        gate_TI = self.get_submodule("gate_proj")(x_TH)
        if not hasattr(source, "_apply_gate"):
            return (source.mlp.activation_fn if act is None else act)(gate_TI) * up_TI
        both = (gate_TI, up_TI)
        joined = torch.cat(both, -1) if _concatenated(source) else torch.stack(both, -1).flatten(-2)
        return source._apply_gate(joined + self._bias("gate_up_proj_bias"))

    def _bias(self, name: str) -> Any:
        biases = getattr(self._source[0], name, None)
        return 0 if biases is None else biases[self._index]


class Experts(nn.Module):
    """All experts of a layer."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self._source = (source,)  # in a tuple: its parameters are not ours
        # Called with what the experts are given; returns the routing to take.
        self.first: Callable[..., tuple[Tensor, ...]] | None = None
        names = ("num_routed_experts", "num_experts")
        self.count = next(int(getattr(source, name)) for name in names if hasattr(source, name))
        for index in range(self.count):
            self.add_module(str(index), Expert(source, index, matrices_of(source, None, index)))
        # What else the library's module has: a norm or an activation, and biases.
        self._modules |= {n: m for n, m in source._modules.items() if n != "mlp"}
        self._parameters |= {n: p for n, p in source._parameters.items() if n.endswith("_bias")}

    @property
    def source(self) -> nn.Module:
        return self._source[0]

    def expert(self, index: int) -> Expert:
        expert = self._modules[str(index)]
        assert isinstance(expert, Expert)
        return expert

    def routed(self, hidden: Tensor, index_NK: Tensor | None = None, *_: Any) -> Routed:
        """Return which rows each expert reads; called with what the experts are called with."""
        x_NH = hidden.reshape(-1, hidden.shape[-1])
        if index_NK is None:  # Llama 4 gives each expert all tokens, zero where not routed to it
            per_expert = len(x_NH) // self.count
            shares = x_NH.view(self.count, per_expert, -1).ne(0).any(-1)
            tokens = tuple(share.nonzero().squeeze(1) for share in shares)
            rows = tuple(tokens_N + index * per_expert for index, tokens_N in enumerate(tokens))
            return Routed(x_NH, rows, tokens, None)
        rows = tuple(places // index_NK.shape[-1] for places in self._places(index_NK))
        everyone = torch.arange(len(x_NH), device=x_NH.device)
        return Routed(x_NH, rows[: self.count], rows[: self.count], everyone)

    def _places(self, index_NK: Tensor) -> tuple[Tensor, ...]:
        """Return the pairs of each expert, in the order of tokens."""
        pairs_P = index_NK.reshape(-1)
        counts = torch.bincount(pairs_P, minlength=self.count).tolist()
        return tuple(pairs_P.argsort(stable=True).split(counts))

    def forward(self, hidden: Tensor, *routing: Any, **named: Any) -> Tensor:
        routing, x_NH = (*routing, *named.values()), hidden.reshape(-1, hidden.shape[-1])
        if self.first is not None:
            routing = self.first(hidden, *routing)
        if not routing:
            out_NH = torch.zeros_like(x_NH)
            for index, rows_T in enumerate(self.routed(hidden).rows):
                if len(rows_T):
                    out_NH[rows_T] = self.expert(index)(x_NH[rows_T])
            return out_NH.view(hidden.shape)
        index_NK, weights_NK = routing
        out_PH = x_NH.new_zeros(index_NK.numel(), x_NH.shape[-1])
        for index, pairs_T in enumerate(self._places(index_NK)):
            x_TH = x_NH[pairs_T // index_NK.shape[-1]]
            if index < self.count and len(pairs_T):
                out_PH[pairs_T] = self.expert(index)(x_TH).to(out_PH.dtype)
            elif len(pairs_T) and hasattr(self.source, "zero_expert_num"):
                out_PH[pairs_T] = x_TH  # LongCat's experts that do nothing
        out_NKH = out_PH.view(*index_NK.shape, -1) * weights_NK[..., None]
        return out_NKH.sum(1).to(hidden.dtype).view(hidden.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sample:
        return Sample(self)


class Sample(nn.Module):
    """One expert in the place of all, for proofs on a copy of a block: experts are alike.

    Its output depends on the routing, too, so that nothing between a norm and a router is
    mistaken for nothing. It has the memory of one expert, where a layer has up to 45 GB in fp32.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        weights = {name: w.clone() for name, w in matrices_of(experts.source, None, 0).items()}
        self.add_module("0", Expert(experts.source, 0, weights))
        self._count = experts.count

    def forward(self, hidden: Tensor, *routing: Any, **named: Any) -> Tensor:
        routing = (*routing, *named.values())
        out: Tensor = self.get_submodule("0")(hidden.reshape(-1, hidden.shape[-1]))
        if routing:
            index_NK, weights_NK = routing
            out = out * (weights_NK * (1 + index_NK / self._count)).sum(-1, keepdim=True)
        return out.to(hidden.dtype).view(hidden.shape)


def is_fused(module: nn.Module) -> bool:
    flagged = hasattr(module, "has_gate") and "down_proj" in module._parameters
    return flagged or type(module).__name__ in _BY_NAME


def matrices_of(source: Any, stored: Mapping[str, Tensor] | None, index: int) -> dict[str, Tensor]:
    """Return the matrices of one expert by the names of its linears, (R, C) each, as views.

    `stored` holds all experts as the parameters of `source` do; without it, these are taken.
    """
    if stored is None:
        stored = {n: source._parameters[n].data for n in _FUSED if n in source._parameters}
    if type(source).__name__ == "DbrxExperts":
        shape = (source.num_experts, -1, source.hidden_size)
        w1, v1, w2 = (getattr(source.mlp, n).data.view(shape)[index] for n in ("w1", "v1", "w2"))
        return {"gate_proj": w1, "up_proj": v1, "down_proj": w2.t()}
    transposed = getattr(source, "is_transposed", type(source).__name__ == "Llama4TextExperts")
    matrices = {n: w[index].t() if transposed else w[index] for n, w in stored.items()}
    if "gate_up_proj" in matrices:
        both_RC = matrices.pop("gate_up_proj")
        gate, up = both_RC.chunk(2) if _concatenated(source) else (both_RC[::2], both_RC[1::2])
        matrices = {"gate_proj": gate, "up_proj": up, **matrices}
    return matrices


def _concatenated(source: nn.Module) -> bool:
    return bool(getattr(source, "is_concatenated", True))


def unfuse(block: nn.Module) -> None:
    """Give a block's experts their own linears."""
    for name, module in list(block.named_modules()):
        if is_fused(module):
            block.set_submodule(name, Experts(module))


def fuse(block: nn.Module) -> None:
    """Undo `unfuse`."""
    for name, module in list(block.named_modules()):
        if isinstance(module, Experts):
            block.set_submodule(name, module.source)


def expert_parts(experts: Experts | Sample, name: str) -> Iterator[ExpertPart]:
    """Yield the groups of linears of experts in order of execution, one expert after another."""
    for index, module in experts.named_children():
        if isinstance(module, Expert):
            path = f"{name}.{index}"
            first = tuple(f"{path}.{n}" for n in ("gate_proj", "up_proj") if n in module._modules)
            yield ExpertPart(name, int(index), first, is_down=False)
            yield ExpertPart(name, int(index), (f"{path}.down_proj",), is_down=True)
