"""A released checkpoint compared with the soup that its makers describe, tensor by tensor.

The soup is rebuilt from its ingredients in double precision, as every soup here, and rounded to
the dtype of the release; what is counted is by how many steps of that dtype the two differ (ulps:
units in the last place). One step is what a last rounding makes. More is another soup, unless it
is what summing in that dtype leaves: where ingredients cancel, steps of the mean are small, and
one step of an ingredient is many of them. So the difference is also counted in steps of the
largest ingredient, number by number; and by the norms of whole tensors.

Steps are counted on the bits: the patterns of one sign have the order of the numbers, so that
the distance is a difference of whole numbers, across zero, among denormals and up to infinity
alike.

One tensor of each checkpoint is in memory at a time. The result is stored by content, and a scan
that is resumed does not read the weights again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from qaudit.checkpoints.places import folder_of
from qaudit.checkpoints.safetensors import WeightFolder, unread_tensors
from qaudit.checkpoints.unchanged import unchanged_files
from qaudit.core.merge import Merge
from qaudit.core.registry import parse_merge
from qaudit.engine.block_pass import Progress
from qaudit.judge.released import WeightDifference
from qaudit.model.blocks import Weights
from qaudit.saved.results import read_sealed, write_sealed
from qaudit.types import RELEASED, Checkpoint, Subject, digest

FORMAT = 1
"""Raised whenever the same weights would give another result."""

FOLDER = "released"
"""The folder beside other evidence of what releases were held against."""

_SLICE = 1 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MOST = torch.iinfo(torch.int64).max


def ulps_between(a: Tensor, b: Tensor) -> Tensor:
    """Return how many steps of their dtype lie between numbers; NaN and a number are farthest.

    Zeros of both signs are one number, and so are all NaNs.
    """
    (sign_a, size_a), (sign_b, size_b) = _ordered(a), _ordered(b)
    apart = torch.where(
        sign_a == sign_b, (size_a - size_b).abs(), size_a.clamp(max=_MOST - size_b) + size_b
    )
    nan_a, nan_b = a.isnan(), b.isnan()
    apart = torch.where(nan_a ^ nan_b, torch.full_like(apart, _MOST), apart)
    return torch.where(nan_a & nan_b, torch.zeros_like(apart), apart)


def _ordered(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sign, and the place among numbers of that sign counted from zero."""
    kind = _BITS[numbers.element_size()]
    bits = numbers.contiguous().view(kind).long()
    return bits < 0, bits & torch.iinfo(kind).max


def difference(
    name: str, released: Tensor, rebuilt: Tensor, ingredients: Sequence[Tensor]
) -> WeightDifference:
    """Return by how much a tensor differs from one of the same dtype, made of ingredients."""
    ulps = unequal = beyond = 0
    apart_squared = squared = of_largest = 0.0
    flat = [tensor.reshape(-1).split(_SLICE) for tensor in (released, rebuilt, *ingredients)]
    for a, b, *parts in zip(*flat, strict=True):
        steps = ulps_between(a, b)
        ulps = max(ulps, int(steps.max()))
        unequal += int((steps > 0).sum())
        beyond += int((steps > 1).sum())
        wide = b.double()
        apart = (a.double() - wide).abs()
        largest = torch.stack([part.double().abs() for part in parts]).amax(dim=0)
        of_largest = max(of_largest, float((apart / _ulp(largest, released.dtype)).max()))
        apart_squared += float(apart.square().sum())
        squared += float(wide.square().sum())
    if apart_squared and squared:
        relative = math.sqrt(apart_squared / squared)
    else:
        relative = math.inf if apart_squared else 0.0
    dtype = _NAMES.get(released.dtype, str(released.dtype).removeprefix("torch."))
    return WeightDifference(
        dtype, ulps, name, released.numel(), unequal, beyond, of_largest, relative
    )


def _ulp(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the step of a dtype at numbers in double precision, none of them negative."""
    info = torch.finfo(dtype)
    _, exponents = torch.frexp(numbers)
    steps = torch.ldexp(torch.full_like(numbers, info.eps), exponents - 1)
    smallest = info.smallest_normal * info.eps
    return torch.where(numbers > 0, steps, smallest).clamp(min=smallest)


def worst(tensors: Iterable[WeightDifference]) -> WeightDifference:
    every = list(tensors)
    if not every:
        return WeightDifference()
    return replace(
        max(every, key=lambda one: (one.ulps, bool(one.dtype))),
        elements=sum(difference.elements for difference in every),
        unequal=sum(difference.unequal for difference in every),
        beyond=sum(difference.beyond for difference in every),
        of_largest=max(difference.of_largest for difference in every),
        relative=max(difference.relative for difference in every),
    )


def compare_weights(
    release: Subject,
    *,
    allow_pickle: bool = False,
    folder: Callable[[Checkpoint], Path] = folder_of,
    progress: Progress = lambda done, total, what: None,
) -> WeightDifference:
    # Tensors alone are compared: of ingredients that are not measured nothing else is downloaded.
    weights_alone = tuple((replace(c, settings=()), share) for c, share in release.members)
    with unchanged_files(replace(release, members=weights_alone), folder):
        places = [folder(checkpoint) for checkpoint, _ in release.members]
        without = unread_tensors(places, [checkpoint for checkpoint, _ in release.members])
        opened = [WeightFolder(p, allow_pickle=allow_pickle, without=without) for p in places]
        labels = [checkpoint.label for checkpoint, _ in release.members]
        if why := _mismatch(labels, opened):
            return WeightDifference(mismatch=why)
        merge = parse_merge((release.merge or "").removeprefix(f"{RELEASED}:"))
        shares = [share for _, share in release.members[1:]]
        parts, names = [], opened[0].names()
        for number, name in enumerate(names):
            progress(number, len(names), name)
            difference = _compared(name, [weights.read(name) for weights in opened], shares, merge)
            if difference.mismatch:
                return difference
            parts.append(difference)
    return worst(parts)


def _compared(
    name: str, tensors: Sequence[Tensor], shares: Sequence[float], merge: Merge
) -> WeightDifference:
    released, *ingredients = tensors
    if all(tensor.is_floating_point() for tensor in tensors):
        rebuilt = merge.merge(ingredients, shares, dtype=released.dtype)
        return difference(name, released, rebuilt, ingredients)
    if all(torch.equal(released, other) for other in ingredients):
        return WeightDifference(elements=released.numel())
    return WeightDifference(mismatch=f"`{name}` holds whole numbers that differ")


def _mismatch(labels: Sequence[str], opened: Sequence[Weights]) -> str:
    """Return the first name or shape in which checkpoints disagree, or nothing."""
    shapes = [{name: weights.shape(name) for name in weights.names()} for weights in opened]
    for label, other in zip(labels[1:], shapes[1:], strict=True):
        for name in sorted(shapes[0].keys() | other.keys()):
            if name not in other or name not in shapes[0]:
                has, lacks = (labels[0], label) if name in shapes[0] else (label, labels[0])
                return f"`{name}` is in `{has}` and not in `{lacks}`"
            if shapes[0][name] != other[name]:
                a, b = list(shapes[0][name]), list(other[name])
                return f"`{name}` is {a} in `{labels[0]}` and {b} in `{label}`"
    return ""


def key_of(release: Subject) -> str:
    members = [(checkpoint.content, share) for checkpoint, share in release.members]
    return digest([FORMAT, release.merge, members])


def compare_stored(release: Subject, evidence: Path) -> WeightDifference | None:
    """Return the saved result for the same weights, if it is whole."""
    key = key_of(release)
    try:
        row = read_sealed(_path(evidence, key))
        numbers = {name: row["difference"][name] for name in WeightDifference.__dataclass_fields__}
        return WeightDifference(**numbers) if row["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_difference(release: Subject, difference: WeightDifference, evidence: Path) -> None:
    """Write a result so that it is there whole or not at all."""
    key = key_of(release)
    text = json.dumps({"key": key, "difference": asdict(difference)})
    write_sealed(_path(evidence, key), text)


def _path(evidence: Path, key: str) -> Path:
    return evidence / FOLDER / f"{key[:16]}.json"
