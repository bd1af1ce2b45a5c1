"""The stream of a file that is quantized already: its own model, block by block beside the base.

Everything of it is run as the file has it: embeddings, norms and head too, which AWQ changes. It
is the base's architecture and vocabulary, which is checked, and it has its own configuration.
What its linears are read from is one block at a time; parameters outside blocks that equal those
of the base take no memory of their own.

The stream of the reference: another subject, as it is, that every stream is compared with.

It runs block by block beside the subject, so that no logits are stored. Its own losses and tasks
are measured in its own pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qaudit.checkpoints.configuration import read_configuration
from qaudit.core.scheme import LOOKS_BROKEN, Shipped
from qaudit.engine.streams import Stream
from qaudit.engine.tally import RoutingWatch, Tally
from qaudit.engine.tokens import Feed, Tokens
from qaudit.errors import ModelError, SourceError, UsageError
from qaudit.formats.reading import Rounding
from qaudit.formats.weights import QuantizedFolder, QuantizedWeights, must_match, open_quantized
from qaudit.model.blocks import Block, BlockModel, Weights
from qaudit.model.structure import weight_of

_TIMES, _LEAST = 3.0, 0.3
_SHIFTED, _UNRELATED = 0.5, 0.9
_UNEVEN_TIMES, _UNEVEN_LEAST = 2.5, 0.08
_OPPOSED = -0.5  # a cosine

Opened = tuple[BlockModel, QuantizedWeights]


def open_shipped(
    scheme: Shipped, folder: Path, base_folder: Path, base_names: frozenset[str], base: BlockModel
) -> Opened:
    """Open a shipped file once the base is loaded."""
    try:
        must_match(scheme.file, folder, base_folder)
    except UsageError as error:  # the plan could not see it: the file was on the Hub
        raise SourceError(error.message, hint=error.hint) from error
    weights = open_quantized(folder, base=base_names)
    if weights.bits != scheme.bits:  # the plan had its configuration alone
        raise SourceError(
            f"`{scheme.file}` is stored in {weights.bits} bits, and its configuration has "
            f"{scheme.bits}, so that it would compete in another class",
            hint="download it and name its folder with `--shipped`: class and bits are then "
            "those of what is stored",
        )
    settings_folder = folder if (folder / "config.json").is_file() else base_folder
    if isinstance(weights, QuantizedFolder) and (other := other_settings(folder, base_folder)):
        weights.notes = (*weights.notes, other)
    model = BlockModel(settings_folder, weights, dtype=base.dtype, device=base.device)
    model.share_with(base)
    return model, weights


_NO_ARITHMETIC = {
    "quantization_config", "compression_config", "torch_dtype", "dtype", "transformers_version",
    "_name_or_path", "architectures", "auto_map", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id", "decoder_start_token_id", "attn_implementation", "_attn_implementation",
}  # fmt: skip
_MOST_KEYS = 4


def other_settings(folder: Path, base_folder: Path) -> str | None:
    """Return a note on what a file's own configuration has otherwise than that of its base."""
    if not all((place / "config.json").is_file() for place in (folder, base_folder)):
        return None
    own, base = (read_configuration(place) for place in (folder, base_folder))
    keys = sorted((own.keys() & base.keys()) - _NO_ARITHMETIC)  # a missing one has its default
    differing = [key for key in keys if own[key] != base[key]]
    values = [f"`{key}: {str(own[key])[:40]}` for `{str(base[key])[:40]}`" for key in differing]
    more = f", and {len(values) - _MOST_KEYS} more" if len(values) > _MOST_KEYS else ""
    note = "measured under its own configuration, which differs from its base's: "
    return f"{note}{', '.join(values[:_MOST_KEYS])}{more}" if values else None


def usual_departure(bits: int) -> float:
    """Return how far codes of a uniform grid are from normal weights, as a share of these.

    A group of 128 spans about 5.5 standard deviations.
    """
    return 5.5 / ((1 << bits) - 1) / math.sqrt(12)


@dataclass(frozen=True)
class RuntimeDeparture:
    """How far a weight is from the base's, once rows and columns are scaled to it.

    Scales that are folded from one linear into another (AWQ) are no departure.
    """

    share: float  # root mean square, of the base's
    shift: float = 0.0  # of its mean, as a share of its root mean square
    uneven: float = 0.0  # how far groups of the file are from the base by scale or offset alone
    per_group: int = 1  # columns
    cause: str = ""  # where it is certain

    @classmethod
    def of(
        cls, own_RC: Tensor, base_RC: Tensor, group_of_C: Tensor | None = None
    ) -> RuntimeDeparture:
        own_RC, base_RC = own_RC.float(), base_RC.float()
        if not bool(own_RC.any()) and bool(base_RC.any()):
            return cls(1.0, cause="all of its weights are zero")
        if float((own_RC * base_RC).sum()) < _OPPOSED * float(own_RC.norm() * base_RC.norm()):
            return cls(1.0, cause="its weights are the base's, negated: scales look negated")
        for dim in (1, 0):
            power = base_RC.square().sum(dim, keepdim=True).clamp_min(1e-30)
            base_RC = base_RC * ((own_RC * base_RC).sum(dim, keepdim=True) / power)
        change_RC = own_RC - base_RC
        size = float(change_RC.square().mean().sqrt())
        whole = float(own_RC.square().mean().sqrt())
        if not size or not whole:
            return cls(1.0 if size else 0.0)
        shift = abs(float(change_RC.mean())) / size
        if group_of_C is None:
            return cls(size / whole, shift)
        group_of_C = group_of_C.to(own_RC.device)
        groups = int(group_of_C.max()) + 1
        uneven = _unevenness(own_RC, base_RC, group_of_C, groups) if groups > 1 else 0.0
        return cls(size / whole, shift, uneven, -(-len(group_of_C) // groups))

    def is_explained(self, bits: int) -> bool:
        """Return whether codes of so many bits are this far away, evenly and without a shift."""
        most = min(max(_TIMES * usual_departure(bits), _LEAST), _UNRELATED)
        # The scale that fits a group is as sure as the number of its columns makes it.
        by_chance = _UNEVEN_TIMES * self.share / math.sqrt(self.per_group)
        is_even = self.uneven <= max(_UNEVEN_LEAST, by_chance)
        return self.share <= most and self.shift <= _SHIFTED and is_even

    @property
    def guess(self) -> str:
        if self.cause:
            return self.cause
        if self.shift > _SHIFTED:
            return "nearly all of it is one shift: zero points look wrong"
        if self.share > _UNRELATED:
            return "the weights look unrelated: another model's, or codes in another order"
        if self.uneven > _UNEVEN_LEAST:
            return (
                f"its groups differ from the base by {self.uneven:.0%} each: scales or zero points "
                "look like those of other groups, as where `g_idx` is lost or wrong"
            )
        return "scales or codes look damaged"


def _unevenness(own_RC: Tensor, base_RC: Tensor, group_of_C: Tensor, groups: int) -> float:
    """Return how far groups are from the base by a scale or an offset of their own.

    Both are standard deviations over groups: of the factor, and of the offset as a share of the
    weights.
    """

    def summed(values_RC: Tensor) -> Tensor:
        if values_RC.is_cuda:  # which adds repeated indices in any order
            return values_RC @ torch.nn.functional.one_hot(group_of_C, groups).to(values_RC)
        return values_RC.new_zeros(len(values_RC), groups).index_add_(1, group_of_C, values_RC)

    power_RG = summed(base_RC.square())
    scales = (summed(own_RC * base_RC) / power_RG.clamp_min(1e-30))[power_RG > 0]
    columns_G = torch.bincount(group_of_C, minlength=groups).clamp_min(1)
    offsets_RG = summed(own_RC - base_RC) / columns_G / own_RC.square().mean().sqrt()
    return max(float(part.std()) if part.numel() > 1 else 0.0 for part in (scales, offsets_RG))


class OtherModel(Stream):
    """A stream of a model of its own, whose blocks are read at the place of the base's."""

    def __init__(self, model: BlockModel, feed: Feed, base: Tokens, routes: RoutingWatch) -> None:
        self.tally = Tally()
        self._model = model
        self._tokens = Tokens(model, feed, base.states, routes, embedded=f"{self.name}/first")
        self._block: Block | None = None

    def tokens(self, shared: Tokens) -> Tokens:
        return self._tokens

    def enter(self, block: Block, tokens: Tokens) -> Block:
        if block.index == 0:
            self._tokens.embed(calibration=False)
        self._block = self._model.load(block.index, block.groups)
        self._block.choose = self._tokens.routes.choose
        return self._block

    def leave(self, block: Block) -> None:
        if self._block is not None:
            self._block.release()
            self._block = None
        self._tokens.drop_embedded(block.index)


class ShippedStream(OtherModel):
    """A stream whose every tensor is read from a quantized file."""

    def __init__(self, scheme: Shipped, opened: Opened, base: Tokens) -> None:
        self.name, self.label = scheme.spec, scheme.short
        self._bits, self._linears = scheme.bits, 0
        self._far: list[tuple[RuntimeDeparture, str]] = []
        self._rounded: set[str] = set()  # linears whose activations are
        model, weights = opened
        super().__init__(model, base.feed, base, base.routes)
        # What the file stores is counted here: nothing is added while it runs.
        self._weights, linears = weights, weights.linears
        self.tally.bits = 8 * sum(weights.nbytes_of(name) for name in linears)
        self.tally.weights = sum(prod(layout.shape) for layout in linears.values())
        self.tally.nbytes = weights.nbytes
        self.tally.note(*weights.notes)

    def state(self) -> dict[str, Any]:
        compared = [[asdict(departure), where] for departure, where in self._far]
        rest = {"linears_read": self._linears, "far": compared, "rounded": sorted(self._rounded)}
        return super().state() | rest

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._linears, self._rounded = state["linears_read"], set(state["rounded"])
        self._far = [(RuntimeDeparture(**values), where) for values, where in state["far"]]

    def enter(self, block: Block, tokens: Tokens) -> Block:
        own = super().enter(block, tokens)
        for group in own.groups:  # read activations as the file's runtime rounds them
            alike: dict[Rounding, list[str]] = {}
            for name in group.linears:
                stored = self._model.stored_name(own.index, name)
                layout = self._weights.linears.get(stored)
                if layout is not None and layout.rounding is not None:
                    alike.setdefault(layout.rounding, []).append(name)
                    self._rounded.add(stored)
            for rounding, names in alike.items():
                own.change_inputs(names, rounding)
        self._compare(block, own)
        return own

    def _compare(self, block: Block, own: Block) -> None:
        """Note linears that are farther from the base's than their codes explain."""
        for name in (name for group in block.groups for name in group.linears):
            weight_RC = weight_of(own.module.get_submodule(name))
            groups_C = self._weights.groups(self._model.stored_name(block.index, name))
            if groups_C is not None and len(groups_C) != weight_RC.shape[1]:
                groups_C = None  # stored with others, or transposed
            departure = RuntimeDeparture.of(weight_RC, block.weight(name), groups_C)
            self._linears += 1
            if not departure.is_explained(self._bits):
                self._far.append((departure, f"block {block.index}, `{name}`"))
        if block.index < self._model.num_blocks - 1:
            return
        rounded = {n for n, layout in self._weights.linears.items() if layout.rounding is not None}
        if unrounded := sorted(rounded - self._rounded):
            self.tally.note(
                f"weights only: what {len(unrounded)} linears outside of blocks read is not "
                f"rounded, `{unrounded[0]}` first"
            )
        if self._far:
            worst, where = max(self._far, key=lambda far: far[0].share)
            self.tally.note(
                f"{LOOKS_BROKEN}: {len(self._far)} of {self._linears} linears are far from those "
                f"of the base: {where} by {worst.share:.0%}, where {self._bits}-bit codes are "
                f"about {usual_departure(self._bits):.0%} away; {worst.guess}"
            )

    def fail(self, error: SourceError) -> None:
        self.evaluated, self.tally.error = False, error
        self._tokens.drop_embedded(self._model.num_blocks)
        self._tokens.drop(self.name)


OTHER_SUBJECT = "reference"


def open_reference(
    label: str,
    folder: Path,
    weights: Callable[[], Weights],
    base: BlockModel,
    *,
    trust_remote_code: bool,
) -> BlockModel:
    model = BlockModel(
        folder, weights(), dtype=base.dtype, device=base.device, trust_remote_code=trust_remote_code
    )
    if (model.model_type, model.num_blocks) != (base.model_type, base.num_blocks):
        raise ModelError(
            f"the reference `{label}` is a `{model.model_type}` of {model.num_blocks} blocks, and "
            f"the subject a `{base.model_type}` of {base.num_blocks}: they do not run side by side",
            hint="name a reference of the same architecture and depth",
        )
    model.share_with(base)
    return model


class ReferenceStream(OtherModel):
    """A stream of another model, which is measured only to compare with it."""

    name = label = OTHER_SUBJECT

    def __init__(self, model: BlockModel, base: Tokens) -> None:
        """Take no items: their losses are those of its own pass; experts are not compared."""
        super().__init__(model, replace(base.feed, items=()), base, RoutingWatch(()))
