"""Quantized weights on the disk: for `export` (`--keep`), and for later rounds of items.

    evidence/kept/KEY/BLOCK-GROUP.safetensors   codes and scales of a group of linears
    evidence/kept/KEY/whole                     how many groups, where later rounds read them
    evidence/kept/CONTENT/model.safetensors     the other tensors of a subject, or shards of them
    evidence/kept/CONTENT/shapes.json           of all its tensors

A group is written as soon as it is quantized: a pass that goes on at a block finds the blocks
before it. For `export` the hashes in the audit decide whether all linears and all other tensors
are there, as they were judged. Codes take a byte each, as schemes hold them.

What a scheme makes depends on the weights and on the calibration text, not on the evaluated text:
a later round reads it, and has the same numbers to the bit. A scheme with forwards or inputs of its
own, or without stored weights, quantizes in each round.

One hash of each linear that a scheme made: of the weight that its codes and scales decode to.

What is not quantized has one hash together.

An export compares what it writes with these hashes, and `verify` what it reads. Columns that a
scheme scaled by powers of two are hashed as a file holds them: scaled, and the rows of an earlier
linear that take the scales divided by them. On one device and in one dtype hashes do not change.

On a GPU, threads copy and hash while the next linears are computed; few at a time, for each holds
its weight.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from qaudit.checkpoints.configuration import unreadable
from qaudit.checkpoints.safetensors import ShardWriter, WeightFolder, save_tensors
from qaudit.core.bnb_codes import NestedMaxima
from qaudit.core.linears import FoldSource, Linears, Quantized, StoredWeight, decoded
from qaudit.core.scheme import Calibration, Scheme, StandIn
from qaudit.errors import SourceError
from qaudit.model.blocks import Weights
from qaudit.saved.exports import SHAPES
from qaudit.types import digest
from qaudit.whole import read_regular, write_whole

REUSED = "went on from kept quantized weights"
"""The note of a measurement that reused the quantized weights of another."""

_WHOLE, _GROUP_FILE = "whole", "{:05}-{:05}.safetensors"
_LARGEST_NBYTES = 2**28  # of a file of shapes, and of one of tensors that are not quantized


class WeightKeeper:
    """Writes what some schemes make of a subject, group by group."""

    def __init__(self, folders: Mapping[str, Path], rest: Path | None) -> None:
        """`folders` has one for each scheme, by canonical form; `rest` is for other tensors."""
        self._folders, self._rest = folders, rest
        self._groups = Counter[tuple[str, int]]()  # of a scheme in a block, so far
        self._left_out: set[str] = set()  # schemes with groups that cannot be read back

    def observe(self, scheme: Scheme, linears: Linears, quantized: Quantized) -> None:
        folder = self._folders.get(scheme.spec)
        if folder is not None and (quantized.forwards or quantized.inputs or not quantized.stored):
            self._left_out.add(scheme.spec)
        if folder is None or not quantized.stored:
            return
        tensors: dict[str, Tensor] = {}
        about = {
            "block": linears.block,
            "bits": quantized.bits,
            "notes": quantized.notes,
            "stored": {n: _as_json(stored, n, tensors) for n, stored in quantized.stored.items()},
            "dtypes": {n: _name(weight.dtype) for n, weight in quantized.weights.items()},
            "fold_source": linears.fold_source and asdict(linears.fold_source),
        }
        scales = {"column_scale_C": quantized.column_scale_C, "fold_C": linears.fold_C}
        tensors |= {name: c.detach().cpu() for name, c in scales.items() if c is not None}
        number = self._groups[scheme.spec, linears.block]
        path = folder / _GROUP_FILE.format(linears.block, number)
        save_tensors(tensors, path, {"about": json.dumps(about)})
        self._groups[scheme.spec, linears.block] += 1

    def begin(self) -> None:
        """Write over what an attempt wrote that ran out of memory."""
        self._groups.clear()
        self._left_out.clear()

    def mark_whole(self) -> None:
        """Let later rounds read what this one wrote."""
        for spec in {spec for spec, _ in self._groups} - self._left_out:
            count = sum(groups for (of, _), groups in self._groups.items() if of == spec)
            write_whole(self._folders[spec] / _WHOLE, str(count))

    def keep_rest(self, weights: Weights, names: Sequence[str]) -> None:
        if self._rest is None:
            return
        shards = ShardWriter(self._rest, _LARGEST_NBYTES)
        for name in names:
            shards.add({name: weights.read(name).detach().cpu().contiguous()})
        shards.finish()
        shapes = {name: list(weights.shape(name)) for name in weights.names()}
        write_whole(self._rest / SHAPES, json.dumps(shapes))


class KeptRest(WeightFolder):
    """The tensors of a subject that a scan kept: those that are not quantized, and all shapes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kept = super().names()
        with _refused_if_damaged(folder):
            shapes = json.loads(read_regular(folder / SHAPES, _LARGEST_NBYTES))
            self._shapes = {name: tuple(map(int, shape)) for name, shape in shapes.items()}

    def names(self) -> Sequence[str]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]


def _files(folder: Path) -> list[Path]:
    """Return regular files: a pipe of that name would be waited for."""
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def kept_groups(folder: Path) -> Iterator[tuple[Linears, Quantized]]:
    """Yield every group of linears that is kept, block by block, in the order of the pass."""
    for path in _files(folder):
        yield _read_group(path, torch.device("cpu"))


def is_whole(folder: Path) -> bool:
    """Return whether a later round can read all quantized weights of a model in a folder."""
    try:
        count = int((folder / _WHOLE).read_text(encoding="ascii"))
        return count == len(_files(folder))
    except (OSError, ValueError):
        return False


def restored(schemes: Sequence[Scheme], folders: Mapping[str, Path]) -> tuple[Scheme, ...]:
    """Return schemes that read what an earlier round wrote, where one did."""
    return tuple(
        Restored(inner=scheme, folder=folders[scheme.spec])
        if scheme.calibration is not Calibration.NONE and is_whole(folders[scheme.spec])
        else scheme
        for scheme in schemes
    )


@dataclass(frozen=True, kw_only=True)
class Restored(StandIn):
    """A scheme whose quantized weights are read, without calibration."""

    folder: Path
    groups: Counter[int] = field(default_factory=Counter, compare=False)  # of a block, so far

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "calibration", Calibration.NONE)

    def begin(self) -> None:
        self.groups.clear()

    def quantize(self, linears: Linears) -> Quantized:
        device = next(iter(linears.weights.values())).device
        path = self.folder / _GROUP_FILE.format(linears.block, self.groups[linears.block])
        self.groups[linears.block] += 1
        with _refused_if_damaged(path):
            _, quantized = _read_group(path, device)
            if quantized.weights.keys() != linears.weights.keys():
                raise ValueError("it is of other linears")
        return replace(quantized, notes=(*quantized.notes, REUSED))


def _read_group(path: Path, device: torch.device) -> tuple[Linears, Quantized]:
    with _refused_if_damaged(path):
        with safe_open(path, framework="pt", device=str(device)) as file:
            about = json.loads((file.metadata() or {})["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        scale_C = tensors.get("column_scale_C")
        stored = {name: _from_json(part, tensors) for name, part in about["stored"].items()}
        like = {n: torch.empty(0, dtype=getattr(torch, about["dtypes"][n])) for n in stored}
        made = decoded(Linears(like), stored, tuple(about["notes"]), column_scale_C=scale_C)
        source = about["fold_source"] and FoldSource(**about["fold_source"])
        fold_C = tensors.get("fold_C")
        linears = Linears(made.weights, block=about["block"], fold_C=fold_C, fold_source=source)
        return linears, replace(made, bits=about["bits"])


def _as_json(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value of a stored weight as JSON; tensors in it are put under their place."""
    match value:
        case Tensor():
            tensors[place] = value.detach().cpu().contiguous().clone()  # codes may share storage
            return {"tensor": place}
        case torch.dtype():
            return {"dtype": _name(value)}
        case _ if is_dataclass(value):
            parts = {
                f.name: _as_json(getattr(value, f.name), f"{place}/{f.name}", tensors)
                for f in fields(value)
            }
            return {"kind": type(value).__name__, "parts": parts}
    return {"value": value}


def _from_json(part: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    match part:
        case {"tensor": place}:
            return tensors[place]
        case {"dtype": name}:
            return getattr(torch, name)
        case {"kind": name, "parts": parts}:
            kinds: list[type[Any]] = [NestedMaxima, StoredWeight]
            for kind in kinds:  # which grows
                kinds += kind.__subclasses__()
            kind = {kind.__name__: kind for kind in kinds}[name]
            return kind(**{name: _from_json(inner, tensors) for name, inner in parts.items()})
    value = part["value"]
    return tuple(value) if isinstance(value, list) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refused_if_damaged(path: Path) -> AbstractContextManager[None]:
    what = f"the kept weights in `{path}` cannot be read"
    return unreadable(what, "remove them and run the same command again", SourceError)


_AT_ONCE = 4


def sha256_of(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{_name(plain.dtype)}{list(plain.shape)}".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def rest_names(
    names: Callable[[int, str], str], stored: Sequence[str], linears: Collection[str]
) -> list[str]:
    """Return the stored tensors that hold none of `linears`, which are named `BLOCK.NAME`.

    Experts that are stored in one tensor have no name of their own: these tensors are told by how
    they end.
    """
    places = [linear.split(".", 1) for linear in linears]
    quantized = {names(int(block), f"{name}.weight") for block, name in places}
    ends = expert_ends(linears)
    return [name for name in stored if name not in quantized and not name.endswith(ends)]


def expert_ends(linears: Collection[str]) -> tuple[str, ...]:
    """Return how tensors end that hold the same linear of all experts."""
    expert = re.compile(r"(?:\d+\.)?(.*experts)\.\d+\.(?:gate|up|down)_proj")
    joined = {match[1] for match in map(expert.fullmatch, linears) if match}
    roles = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
    tensors = [f".{owner}.{role}" for owner in joined for role in roles]
    return tuple(tensor + end for tensor in tensors for end in ("", ".weight"))


def rest_sha256(weights: Weights, names: Sequence[str]) -> str:
    return digest(sorted((name, sha256_of(weights.read(name))) for name in names))


class LinearHashes:
    """The hashes of one pass, by scheme and by `BLOCK.NAME` of a linear."""

    def __init__(self) -> None:
        self._hashes: dict[str, dict[str, Future[str]]] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, "hash")
        self._waiting: list[Future[str]] = []
        self._written: dict[tuple[str, str], Tensor] = {}  # what may yet be divided, of this block
        self._block = 0

    def __enter__(self) -> LinearHashes:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def of(self, spec: str) -> dict[str, str]:
        return {name: hashed.result() for name, hashed in self._hashes.get(spec, {}).items()}

    def state(self) -> dict[str, dict[str, str]]:
        """Return all hashes so far, between two blocks."""
        return {spec: self.of(spec) for spec in self._hashes}

    def restore(self, state: Mapping[str, Mapping[str, str]]) -> None:
        """Take hashes of blocks before the present one."""
        for spec, hashes in state.items():
            for name, sha256 in hashes.items():
                hashed: Future[str] = Future()
                hashed.set_result(sha256)
                self._hashes.setdefault(spec, {})[name] = hashed

    def observe(self, scheme: Scheme, linears: Linears, quantized: Quantized) -> None:
        if linears.block != self._block:
            self._block = linears.block
            self._written.clear()
        exact = getattr(scheme, "exact_fold", False)
        scale_C = quantized.column_scale_C if exact else None
        source, fold_C = linears.fold_source, linears.fold_C
        if scale_C is not None and fold_C is not None and source is not None and not source.is_norm:
            # Hash an earlier linear again, whose rows take the scales of these columns.
            weight_RC = self._written.get((scheme.spec, source.name))
            if weight_RC is not None:
                rows = source.offset + fold_C.to(weight_RC.device)
                divided_RC = weight_RC.clone()
                divided_RC[rows] = weight_RC[rows] / scale_C[:, None].to(weight_RC)
                self._put(scheme.spec, source.name, divided_RC, keep=True)
        for name, weight_RC in quantized.weights.items():
            if scale_C is not None:
                weight_RC = weight_RC * scale_C.to(weight_RC.dtype)
            self._put(scheme.spec, name, weight_RC, keep=exact)

    def _put(self, spec: str, name: str, weight_RC: Tensor, *, keep: bool) -> None:
        if keep:
            self._written[spec, name] = weight_RC
        while len(self._waiting) >= _AT_ONCE:
            self._waiting.pop(0).result()
        ready = torch.cuda.Event() if weight_RC.is_cuda else None
        if ready is not None:
            ready.record(torch.cuda.current_stream(weight_RC.device))

        def hash_beside_computing() -> str:
            """Hash the weight; a GPU's is copied beside its next computation."""
            if ready is None:
                return sha256_of(weight_RC)
            ready.synchronize()  # of this thread alone
            with torch.cuda.stream(torch.cuda.Stream(weight_RC.device)):
                return sha256_of(weight_RC)

        hashed = self._threads.submit(hash_beside_computing)
        self._waiting.append(hashed)
        self._hashes.setdefault(spec, {})[f"{self._block}.{name}"] = hashed
