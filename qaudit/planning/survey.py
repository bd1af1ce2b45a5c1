"""How large the models of a plan are and how far they read, from headers and configurations.

A plan needs the largest model and the shortest context, so that every checkpoint's
configuration is read (a few kilobytes, and equal ones once) while headers are read once for
each distinct set of files: checkpoints of one repository whose files have equal names and sizes
hold tensors of equal shapes, and if one of them did not, its measurement reads its own
header first. Where everything is in the cache, no request is sent.

A model that cannot be read is skipped with its reason when its turn comes; if none can be
read, there is nothing to plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from qaudit import families
from qaudit.checkpoints.adapters import must_share_tokens, open_checkpoint, read_adapter
from qaudit.checkpoints.configuration import (
    is_own_code,
    longest_context,
    must_be_held,
    read_configuration,
)
from qaudit.checkpoints.header import ITEMSIZE, TensorInfo
from qaudit.checkpoints.safetensors import ADAPTER, WeightFolder
from qaudit.checkpoints.stamps import folder_of, own_folder
from qaudit.core.scheme import shipped_reference
from qaudit.errors import SourceError, UsageError
from qaudit.families.family import Need
from qaudit.formats.weights import QuantizedFolder, format_of, quantization_of
from qaudit.hub import Hub
from qaudit.hub.weights import weights_on_hub
from qaudit.model.proven import STREAMABLE, left_as_gates, reads_trees
from qaudit.planning.sizes import Sizes, first_whole, with_beside
from qaudit.support.sizes import size
from qaudit.types import Checkpoint, Subject

LONGEST_CONTEXT = 2048  # the default context is the smaller of this and the model's maximum


@dataclass(frozen=True)
class Survey:
    """What a plan has to know of its models."""

    largest: Sizes
    longest_context: int  # that all of them can read
    reads_trees: bool  # all of them: contexts of items are fed once
    notes: tuple[str, ...] = ()
    references: tuple[str, ...] = ()  # notes of models that are quantized already


def survey(
    subjects: Sequence[Subject], hub: Hub | None, *, allow_pickle: bool, code: bool
) -> Survey:
    surveyor = _Surveyor(hub, allow_pickle, code)
    models, failures = [], []
    members = {str(own_folder(c)): c for s in subjects for c, _ in s.members}
    for checkpoint in members.values():
        try:
            models.append(surveyor.look_at(checkpoint))
        except SourceError as error:
            if f"`{checkpoint.label}`" not in error.message:
                error.message = f"`{checkpoint.label}` cannot be read: {error.message}"
            failures.append(error)
    if not models:
        raise failures[0]
    for subject in (subject for subject in subjects if subject.merge is not None):
        for member, _ in subject.members:
            if quantization_of(folder_of(member)) is not None:
                raise UsageError(
                    f"`{member.label}`, a member of `{subject.label}`, is quantized already",
                    hint="merge the checkpoints before they are quantized: bf16, fp16 or fp32",
                )
    return Survey(
        largest=max((sizes for sizes, _, _ in models), key=lambda sizes: sizes.parameters),
        longest_context=min(context for _, context, _ in models),
        reads_trees=all(trees for _, _, trees in models),
        notes=tuple(surveyor.notes),
        references=tuple(surveyor.references),
    )


def must_be_auditable(checkpoint: Checkpoint, hub: Hub | None) -> None:
    """Refuse a checkpoint that a plan would refuse, by its configuration and headers."""
    _Surveyor(hub, allow_pickle=True, code=True).look_at(checkpoint)


class _Surveyor:
    """Reads headers and configurations, and remembers what stands for more than one checkpoint."""

    def __init__(self, hub: Hub | None, allow_pickle: bool, code: bool) -> None:
        self._hub, self._allow_pickle, self._code = hub, allow_pickle, code
        self._known: dict[tuple[object, ...], Sizes] = {}
        self.notes: list[str] = []
        self.references: list[str] = []

    def look_at(self, checkpoint: Checkpoint) -> tuple[Sizes, int, bool]:
        if checkpoint.base is not None and checkpoint.is_adapter:
            return self._look_at_adapter(checkpoint, checkpoint.base)
        hub = None if checkpoint.commit is None else self._hub
        folder = hub.fetcher.settings(checkpoint, code=self._code) if hub else folder_of(checkpoint)
        config = read_configuration(folder)
        if "remote_code" not in checkpoint.requires and is_own_code(config):
            # Only the configuration tells of it.
            needing = replace(checkpoint, requires=(*checkpoint.requires, "remote_code"))
            refuse([needing], allow_pickle=True, trust_remote_code=self._code)
            self.notes += allowed_notes([replace(needing, requires=("remote_code",))])
        if quantization_of(folder) is not None:
            name, bits, _ = format_of(folder)
            self.references.append(shipped_reference(checkpoint.label, name, bits))
        files = tuple((file.name, file.nbytes) for file in checkpoint.files)
        key = (checkpoint.ref.location, checkpoint.ref.subfolder, files)
        if key not in self._known:
            self._known[key] = self._sizes(checkpoint, folder, config, hub)
        must_be_held(config, self._known[key].tensors, f"`{checkpoint.label}`")
        sizes = with_beside(with_experts(self._known[key], config), config)
        return sizes, longest_context(config, LONGEST_CONTEXT), reads_trees(config)

    def _look_at_adapter(self, checkpoint: Checkpoint, base: Checkpoint) -> tuple[Sizes, int, bool]:
        """Look at the base; of an adapter, at what fits or does not where the base is here."""
        looked = self.look_at(base)
        folder = folder_of(base)
        if quantization_of(folder) is not None:
            raise SourceError(
                f"`{base.label}`, which the adapter `{checkpoint.label}` changes, is quantized",
                hint="name the model that it was quantized from as `base_model_name_or_path` in "
                f"`{own_folder(checkpoint) / ADAPTER}`",
            )
        must_share_tokens(own_folder(checkpoint), folder)
        missing = self._hub.fetcher.nbytes_missing if self._hub is not None else lambda _: 0
        if not any(map(missing, checkpoint.sources)):
            open_checkpoint(checkpoint, allow_pickle=self._allow_pickle)
        else:
            read_adapter(own_folder(checkpoint))
        return looked

    def _sizes(
        self, checkpoint: Checkpoint, folder: Path, config: Mapping[str, Any], hub: Hub | None
    ) -> Sizes:
        name, is_quantized = str(checkpoint.ref), quantization_of(folder) is not None
        missing = hub is not None and bool(hub.fetcher.nbytes_missing(checkpoint))
        pickled = hub is not None and not is_quantized and "pickle" in checkpoint.requires
        shapes: Mapping[str, tuple[int, ...]] = {}
        try:
            if not (missing and pickled):
                shapes = shapes_of(checkpoint, folder, hub, allow_pickle=self._allow_pickle)
        except SourceError:
            if hub is None or is_quantized != missing:
                raise
            if not (is_quantized or pickled):  # damaged: the download detects and repairs it
                shapes = {tensor: info.shape for tensor, info in _headers(hub, checkpoint).items()}
        if not shapes and hub is not None:  # of a quantized file they are in the tensors themselves
            if pickled:
                self.notes.append(f"the size of `{name}` is estimated from its configuration")
            return Sizes.of_config(config, name)
        sizes = Sizes.of(shapes, name)
        if not is_known(config):
            must_be_held(config, sizes.tensors, f"`{checkpoint.label}`")  # before it is made
            must_open(folder, shapes)
        return sizes


def shapes_of(
    checkpoint: Checkpoint, folder: Path, hub: Hub | None, *, allow_pickle: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors, decoded; by headers alone where it is remote."""
    remote = hub is not None and bool(hub.fetcher.nbytes_missing(checkpoint))
    infos = _headers(hub, checkpoint) if hub is not None and remote else None
    if quantization_of(folder) is None and infos is not None:
        return {name: info.shape for name, info in infos.items()}
    weights = (
        WeightFolder(own_folder(checkpoint), allow_pickle=allow_pickle)
        if quantization_of(folder) is None
        else QuantizedFolder(folder, infos=infos)
    )
    return {name: weights.shape(name) for name in weights.names()}


def _headers(hub: Hub, checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    files = weights_on_hub(checkpoint)
    shapes = hub.listing.shapes(checkpoint.ref.location, str(checkpoint.commit), files)
    return {
        tensor: TensorInfo(dtype, tuple(shape), "", 0, ITEMSIZE[dtype] * prod(shape))
        for tensor, (dtype, shape) in shapes.items()
    }


def must_open(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse what the engine could not open, before its weights are downloaded."""
    if find_spec("torch") is None:  # an installation that only plans
        return
    from qaudit.model import skeleton

    skeleton.must_open(folder, shapes)


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether a model type needs no look: a test holds it, or code of its own makes it."""
    return str(config.get("model_type")) in STREAMABLE or is_own_code(config)


_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_OF_EXPERTS = re.compile(r"^(.*?\bexperts)\b")


def with_experts(sizes: Sizes, config: Mapping[str, Any]) -> Sizes:
    """Return the sizes with the experts of a layer, and how many of them read a token."""
    config = {**config, **(config.get("text_config") or {})}
    count, each = (first_whole(config, *names) for names in (_EXPERTS, _PER_TOKEN))
    return replace(sizes, experts=count, per_token=min(each, count)) if count and each else sizes


def expert_notes(sizes: Sizes) -> Iterator[str]:
    """Yield what experts cost, and which routers and gates are left as they are."""
    if not sizes.experts:
        return
    nbytes = 4 * sizes.widest**2  # of one expert
    yield (
        f"{sizes.per_token} of {sizes.experts} experts in a layer read a token; statistics of one "
        f"expert are in memory at a time, up to {size(nbytes)}, where those of a layer take "
        f"{size(nbytes * sizes.experts)}"
    )
    names = list(dict.fromkeys(name for _, name in sizes.matrices))
    owners = {match[1] for name in names if (match := _OF_EXPERTS.search(name))}
    gates = list(left_as_gates(names, owners or {"mlp.experts"}))
    if gates:
        shown = ", ".join(f"`{name}`" for name in gates[:4]) + ", ..." * (len(gates) > 4)
        yield f"routers and small gates are left as they are: {shown}"


_PERMISSIONS: dict[Need, tuple[str, str, str, str]] = {
    "pickle": (
        "--allow-pickle",
        "has its weights as pickles only, and opening a pickle can run code",
        "they are then read with a loader that takes nothing but tensors",
        "pickled weights are read, with a loader that takes nothing but tensors",
    ),
    "remote_code": (
        "--trust-remote-code",
        "has its model as code of its own, which is not run unless asked for",
        "that Python then runs on this machine with all your rights: read it first",
        "code of the repository is run on this machine",
    ),
}
"""What is never done unless a flag permits it, as in `Checkpoint.requires`: the flag, why it is
refused, what permitting it means, and the note on what is done."""


def refuse(
    checkpoints: Sequence[Checkpoint], *, allow_pickle: bool, trust_remote_code: bool
) -> None:
    allowed = {"pickle": allow_pickle, "remote_code": trust_remote_code}
    refused = {need: some for need, some in _needing(checkpoints).items() if not allowed[need]}
    if not refused:
        return
    reasons = [
        f"{_some(needing)} {_PERMISSIONS[need][1]}{_why(need, needing)}"
        for need, needing in refused.items()
    ]
    flags = " ".join(f"`{_PERMISSIONS[need][0]}`" for need in refused)
    raise UsageError(
        "; ".join(reasons),
        hint=f"pass {flags} if you trust where it comes from; "
        + "; ".join(_PERMISSIONS[need][2] for need in refused),
    )


def allowed_notes(checkpoints: Sequence[Checkpoint]) -> tuple[str, ...]:
    """Return a note for everything that was allowed and is going to be done."""
    return tuple(
        f"{_some(needing)}: {_PERMISSIONS[need][3]}{_why(need, needing)}"
        for need, needing in _needing(checkpoints).items()
    )


def _needing(checkpoints: Sequence[Checkpoint]) -> dict[Need, list[Checkpoint]]:
    needing = {need: [c for c in checkpoints if need in c.requires] for need in _PERMISSIONS}
    return {need: some for need, some in needing.items() if some}


def _some(checkpoints: Sequence[Checkpoint]) -> str:
    first = checkpoints[0]
    where = "" if first.label == first.ref.location else f" of `{first.ref.location}`"
    more = f" (like {len(checkpoints) - 1} more)" if len(checkpoints) > 1 else ""
    return f"`{first.label}`{where}{more}"


def _why(need: Need, checkpoints: Sequence[Checkpoint]) -> str:
    by_name = {family.family: family.why_required for family in families.all_families()}
    whys = (by_name.get(c.family or "", {}).get(need) for c in checkpoints)
    reasons = dict.fromkeys(why for why in whys if why)
    return f" ({'; '.join(reasons)})" if reasons else ""
