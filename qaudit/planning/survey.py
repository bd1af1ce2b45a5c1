"""How large the models of a plan are and how far they read, from headers and configurations.

A plan needs the largest model and the shortest context, so that every checkpoint's
configuration is read (a few kilobytes, and equal ones once) while headers are read once for
each distinct set of files: checkpoints of one repository whose files have equal names and sizes
hold tensors of equal shapes, and if one of them did not, its measurement reads its own
header first. Where everything is in the cache, no request is sent.

A model that cannot be read is skipped with its reason when its turn comes; if none can be
read, there is nothing to plan.

The catalog of a series is what is known of it before a scan. Names cost one request for a
repository. File trees are read for the selected checkpoints, because a scan reads them too and
keeps them; for more than `MOST_TREES` only with `check`, which reads all of them. Every tree that
was read is kept, so an interrupted walk resumes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
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
from qaudit.checkpoints.folder import family_of, weights_nbytes, with_hashes
from qaudit.checkpoints.header import ITEMSIZE, TensorInfo
from qaudit.checkpoints.safetensors import ADAPTER, WeightFolder
from qaudit.checkpoints.series import tell_apart
from qaudit.checkpoints.stamps import folder_of, own_folder
from qaudit.core.scheme import shipped_reference
from qaudit.errors import (
    HubError,
    ModelError,
    QauditError,
    SourceError,
    UsageError,
)
from qaudit.families.family import Need
from qaudit.formats.weights import QuantizedFolder, format_of, quantization_of
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import find_all, weights_on_hub, with_files
from qaudit.judge.rules import content_findings
from qaudit.model.proven import STREAMABLE, left_as_gates, reads_trees
from qaudit.planning.sizes import Sizes, with_config
from qaudit.recipe.selection import is_default_choice, select
from qaudit.report.plan import Catalog
from qaudit.support.sizes import size
from qaudit.types import Checkpoint, Recipe, Subject, Watch
from qaudit.whole import read_regular

LONGEST_CONTEXT = 2048  # the default context is the smaller of this and the model's maximum


class Survey:
    """What a plan has to know of its models; what stands for several checkpoints is read once."""

    largest: Sizes
    longest_context: int  # that all of them can read
    reads_trees: bool  # all of them: contexts of items are fed once

    def __init__(self, hub: Hub | None, *, allow_pickle: bool, code: bool) -> None:
        self._hub, self._allow_pickle, self._code = hub, allow_pickle, code
        self._known: dict[tuple[object, ...], Sizes] = {}
        self.notes: list[str] = []
        self.references: list[str] = []  # notes of models that are quantized already

    def look_at_all(self, subjects: Sequence[Subject]) -> None:
        models, failures = [], []
        members = {str(own_folder(c)): c for s in subjects for c, _ in s.members}
        for checkpoint in members.values():
            try:
                models.append(self.look_at(checkpoint))
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
        every_size, contexts, trees = zip(*models, strict=True)
        self.largest = max(every_size, key=lambda sizes: sizes.parameters)
        self.longest_context, self.reads_trees = min(contexts), all(trees)

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
        sizes = with_config(self._known[key], config)
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
        # A test holds its model type, or code of its own makes it.
        is_known = str(config.get("model_type")) in STREAMABLE or is_own_code(config)
        if not is_known:
            must_be_held(config, sizes.tensors, f"`{checkpoint.label}`")  # before it is made
            if find_spec("torch") is not None:  # it is in an installation that only plans
                from qaudit.model import skeleton

                skeleton.must_open(folder, shapes)  # before its weights are downloaded
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


_OF_EXPERTS = re.compile(r"^(.*?\bexperts)\b")


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
    refused = [each for each in _needing(checkpoints) if not allowed[each[0]]]
    if not refused:
        return
    flags = " ".join(f"`{_PERMISSIONS[need][0]}`" for need, _, _ in refused)
    raise UsageError(
        "; ".join(f"{which} {_PERMISSIONS[need][1]}{why}" for need, which, why in refused),
        hint=f"pass {flags} if you trust where it comes from; "
        + "; ".join(_PERMISSIONS[need][2] for need, _, _ in refused),
    )


def allowed_notes(checkpoints: Sequence[Checkpoint]) -> tuple[str, ...]:
    """Return a note for everything that was allowed and is going to be done."""
    needing = _needing(checkpoints)
    return tuple(f"{which}: {_PERMISSIONS[need][3]}{why}" for need, which, why in needing)


def _needing(checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[Need, str, str]]:
    """Yield what is needed, which checkpoints need it, and why, where a family says it."""
    by_name = {family.family: family.why_required for family in families.all_families()}
    for need in _PERMISSIONS:
        needing = [c for c in checkpoints if need in c.requires]
        if not needing:
            continue
        first, whys = needing[0], (by_name.get(c.family or "", {}).get(need) for c in needing)
        where = "" if first.label == first.ref.location else f" of `{first.ref.location}`"
        more = f" (like {len(needing) - 1} more)" if len(needing) > 1 else ""
        reasons = "; ".join(dict.fromkeys(why for why in whys if why))
        yield need, f"`{first.label}`{where}{more}", f" ({reasons})" if reasons else ""


MOST_TREES = 32
"""File trees to read without `check`: far from the 500 requests that strangers have."""


def read_catalog(
    recipe: Recipe, watch: Watch, *, check: bool = False
) -> tuple[Catalog, dict[str, int]]:
    """Return the catalog of a series, and how many trees failed for which reason."""
    hub = cache(lambda: open_hub(watch=watch))  # opened where something is there
    names = find_all(recipe.targets, recipe, lambda: hub().listing)
    selected = {checkpoint.label for checkpoint in select(recipe, names)}
    wanted = {c.label for c in names} if check else selected
    if len(wanted) > MOST_TREES and not check:
        wanted = set()
    asked = [c for c in names if c.label in wanted and c.commit]
    errors = _fetch_trees(asked, hub(), watch) if asked else {}
    parts: list[tuple[Checkpoint, str]] = []
    for name in names:
        if name.commit is None:
            some = with_hashes([name]) if check else (name,)
        else:
            unread = name.label not in wanted or _place(name) in errors
            some = with_files(hub().listing, [name], known_only=unread, keep_all=True)
        parts += [(part, name.label) for part in some]
    checkpoints = tell_apart(part for part, _ in parts)
    # Of folders beside each other the last with the same configuration is opened. Those of the Hub
    # are asked for with `--check` alone: they are further requests.
    last = {_model(c): c for c in checkpoints if c.commit is None or (c.files and check)}
    refusals = []
    for checkpoint in last.values():
        try:
            reached = None if checkpoint.commit is None else hub()
            Survey(reached, allow_pickle=True, code=True).look_at(checkpoint)
        except ModelError as error:
            refusals.append(f"`{checkpoint.label}` cannot be audited: {error.message}")
        except QauditError:  # damaged, or not reached: another matter
            continue
    families = {c.family: c for c in reversed(names) if c.family}
    catalog = Catalog(
        targets=recipe.targets,
        checkpoints=checkpoints,
        selected=frozenset(
            c.label for c, (_, name) in zip(checkpoints, parts, strict=True) if name in selected
        ),
        by_default=is_default_choice(recipe, names),
        nbytes={
            c.label: weights_nbytes(c) for c in checkpoints if c.commit is None and not c.files
        },
        findings=content_findings(checkpoints),
        refusals=tuple(refusals),
        remarks=tuple(r for name, c in families.items() for r in family_of(c, name).remarks),
    )
    return catalog, dict(Counter(errors.values()))


def _fetch_trees(
    checkpoints: Sequence[Checkpoint], hub: Hub, watch: Watch
) -> dict[tuple[str, str], str]:
    """Read every tree that is not known yet; return why some failed, which leaves the others."""
    errors: dict[tuple[str, str], str] = {}
    places = dict.fromkeys(map(_place, checkpoints))
    missing = [p for p in places if hub.listing.known_files(*p) is None]
    for count, place in enumerate(missing, 1):
        try:
            hub.listing.files(*place)
        except HubError as error:
            errors[place] = error.message
        watch.count("file trees", count, len(missing))
    return errors


def _model(checkpoint: Checkpoint) -> tuple[str, bytes]:
    """Return what checkpoints of one model share: the repository, or folder and configuration."""
    if checkpoint.commit is not None:
        return checkpoint.ref.location, b""
    folder, configuration = folder_of(checkpoint), b""
    with suppress(OSError):  # which its headers are refused for
        configuration = read_regular(folder / "config.json")
    return str(folder.parent), configuration


def _place(checkpoint: Checkpoint) -> tuple[str, str]:
    return checkpoint.ref.location, str(checkpoint.commit)
