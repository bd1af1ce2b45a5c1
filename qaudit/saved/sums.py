"""Sums by document as the arrays of a file, and back; of each sample for rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from qaudit.core.histogram import BINS
from qaudit.types import (
    CONFIDENCE_EDGES,
    ByConfidence,
    Fidelity,
    Positions,
    Roles,
    RolloutEvidence,
    Routing,
)

Array = np.ndarray[Any, Any]


def column_in(
    arrays: Mapping[str, Array], name: str, kinds: str, count: int | None = None
) -> Array:
    """Return a column of the right kind and length; statistics take it as it is."""
    if name not in arrays:
        raise ValueError(f"it lacks `{name}`")
    column = arrays[name]
    if column.ndim != 1 or (column.size and column.dtype.kind not in kinds):
        raise ValueError(f"its `{name}` is no column of such values")
    if count is not None and len(column) != count:
        raise ValueError("it holds columns of different lengths")
    return column


def whole_numbers(arrays: Mapping[str, Array], name: str, count: int) -> Array:
    return _not_negative(column_in(arrays, name, "iu", count), name)


def text_in(arrays: Mapping[str, Array], name: str) -> str:
    text = arrays.get(name, np.array(""))
    if text.shape != () or text.dtype.kind != "U":
        raise ValueError(f"its `{name}` is no text")
    return str(text)


def are_there(arrays: Mapping[str, Array], names: tuple[str, ...]) -> bool:
    absent = [name for name in names if name not in arrays]
    if 0 < len(absent) < len(names):
        raise ValueError(f"it lacks `{absent[0]}`")
    return not absent


def numbers_in(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    """Return numbers of this shape; a loss may be infinite."""
    array = arrays[name]
    if array.shape != shape or (array.size and array.dtype.kind != "f"):
        raise ValueError(f"its `{name}` is no array of such values")
    return array


def amounts_in(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    array = numbers_in(arrays, name, shape)
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"its `{name}` is not finite, or below zero")
    return array


def counts_in(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    array = arrays[name]
    if array.shape != shape or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"its `{name}` is no array of counts")
    return _not_negative(array, name)


def _not_negative(array: Array, name: str) -> Array:
    if (array < 0).any():
        raise ValueError(f"its `{name}` are below zero")
    return array


Tokens = npt.NDArray[np.int64]
_Binned = TypeVar("_Binned", Positions, Roles)
_FIDELITY = ("kl_sum", "kl_max", "kl_counts", "same_top", "squared_dp_sum")
_CONFIDENCE = ("confidence_tokens", "confidence_kl_sum", "confidence_flips")
REFERENCE, ROLLOUT = "reference_", "rollout_"
_POSITIONS = ("position_edges", "position_tokens", "position_nll_sum")
_ROLES = ("role_names", "role_tokens", "role_nll_sum")
_ROUTING = ("routing_blocks", "routing_same", "routing_moved")
_MOST_POSITIONS, _MOST_ROLES = 64, 32
_ABOVE_ONE = 1e-3  # of a log-probability: rounding in a long sum


def sums_arrays(fidelity: Fidelity | None, positions: Positions | None) -> dict[str, Array]:
    arrays: dict[str, Array | None] = {}
    if fidelity is not None:
        arrays |= fidelity_arrays(fidelity)
    if positions is not None:
        arrays |= {f"position_{name}": value for name, value in vars(positions).items()}
    return {name: value for name, value in arrays.items() if value is not None}


def fidelity_arrays(fidelity: Fidelity) -> dict[str, Array]:
    arrays = {name: getattr(fidelity, name) for name in _FIDELITY}
    if fidelity.by_confidence is not None:
        sums = vars(fidelity.by_confidence)
        arrays |= {f"confidence_{name}": array for name, array in sums.items()}
    return arrays


def fidelity_in(arrays: Mapping[str, Array], tokens: Tokens) -> Fidelity | None:
    if not are_there(arrays, _FIDELITY):
        return None
    shape = tokens.shape
    counts = counts_in(arrays, "kl_counts", (*shape, BINS))
    same_top = counts_in(arrays, "same_top", shape)
    if (counts.sum(axis=1, dtype=np.int64) != tokens).any():
        raise ValueError("its `kl_counts` are not of its tokens")
    if (same_top > tokens).any():
        raise ValueError("its `same_top` are more than its tokens")
    return Fidelity(
        kl_sum=amounts_in(arrays, "kl_sum", shape),
        kl_max=amounts_in(arrays, "kl_max", shape),
        kl_counts=counts,
        same_top=same_top,
        squared_dp_sum=amounts_in(arrays, "squared_dp_sum", shape),
        by_confidence=_by_confidence(arrays, tokens, same_top),
    )


def _by_confidence(
    arrays: Mapping[str, Array], tokens: Tokens, same_top: Array
) -> ByConfidence | None:
    """Read the sums by confidence, which older files do not have."""
    if not are_there(arrays, _CONFIDENCE):
        return None
    shape = (*tokens.shape, len(CONFIDENCE_EDGES) + 1)
    counts = counts_in(arrays, "confidence_tokens", shape)
    flips = counts_in(arrays, "confidence_flips", shape)
    if (counts.sum(axis=1, dtype=np.int64) != tokens).any() or (flips > counts).any():
        raise ValueError("its `confidence_tokens` are not of its tokens")
    if (flips.sum(axis=1, dtype=np.int64) != tokens - same_top).any():
        raise ValueError("its `confidence_flips` are not those of `same_top`")
    return ByConfidence(
        counts.astype(np.int64),
        amounts_in(arrays, "confidence_kl_sum", shape),
        flips.astype(np.int64),
    )


def behind(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {n.removeprefix(prefix): arrays[n] for n in arrays if n.startswith(prefix)}


def positions_in(
    arrays: Mapping[str, Array], tokens: Tokens, *, compared: bool
) -> Positions | None:
    if not are_there(arrays, _POSITIONS):
        return None
    edges = arrays["position_edges"]
    if edges.ndim != 1 or edges.dtype.kind not in "iu" or not 2 <= len(edges) <= _MOST_POSITIONS:
        raise ValueError("its `position_edges` are no bins")
    if edges[0] != 0 or (np.diff(edges.astype(np.int64)) <= 0).any():
        raise ValueError("its `position_edges` do not rise from 0")
    return Positions(
        edges.astype(np.int64), *_binned(arrays, "position", len(edges) - 1, tokens, compared)
    )


def roles_in(arrays: Mapping[str, Array], tokens: Tokens, *, compared: bool) -> Roles | None:
    if not are_there(arrays, _ROLES):
        return None
    names = tuple(map(str, column_in(arrays, "role_names", "U")))
    if not 1 <= len(names) <= _MOST_ROLES or len(set(names)) < len(names):
        raise ValueError("its `role_names` are no roles")
    return Roles(names, *_binned(arrays, "role", len(names), tokens, compared))


def rollouts_in(arrays: Mapping[str, Array]) -> RolloutEvidence:
    prompt = whole_numbers(arrays, "rollout_prompt", len(column_in(arrays, "rollout_prompt", "iu")))
    count = len(prompt)
    tokens = whole_numbers(arrays, "rollout_tokens", count)
    agreed = column_in(arrays, "rollout_agreed", "i", count)
    if (agreed < -1).any() or (agreed > tokens).any():
        raise ValueError("its `rollout_agreed` are not of its tokens")
    if "rollout_sha256" not in arrays:
        raise ValueError("it lacks `rollout_sha256`")
    names = tuple(map(str, column_in(arrays, "rollout_end_names", "U")))
    for name in ("rollout_nll_sum", "rollout_end_sum"):
        if name not in arrays:
            raise ValueError(f"it lacks `{name}`")
    has_kl = "rollout_kl_sum" in arrays
    of_rollouts = behind(ROLLOUT, arrays)
    positions = positions_in(of_rollouts, tokens, compared=has_kl)
    roles = roles_in(of_rollouts, tokens, compared=has_kl)
    return RolloutEvidence(
        text_in(arrays, "rollout_sha256"),
        prompt.astype(np.int64),
        tokens.astype(np.int64),
        numbers_in(arrays, "rollout_nll_sum", (count,)),
        agreed.astype(np.int64),
        names,
        amounts_in(arrays, "rollout_end_sum", (count, len(names))),
        amounts_in(arrays, "rollout_kl_sum", (count,)) if has_kl else None,
        *_marks(arrays, count),
        text_in(arrays, "rollout_weights_sha256"),
        text_in(arrays, "rollout_unweighed"),
        positions and _with_ends(positions, "position", of_rollouts, len(names)),
        roles and _with_ends(roles, "role", of_rollouts, len(names)),
    )


def _with_ends(binned: _Binned, kind: str, arrays: Mapping[str, Array], groups: int) -> _Binned:
    name = f"{kind}_end_sum"
    if name not in arrays:
        raise ValueError(f"it lacks `{ROLLOUT}{name}`")
    return replace(binned, end_sum=amounts_in(arrays, name, (*binned.tokens.shape, groups)))


def _marks(
    arrays: Mapping[str, Array], count: int
) -> tuple[Array | None, Array | None, Array | None]:
    """Read marks, NaN where there is none, log-probabilities, which may be those of never, and
    entropies.
    """
    mark, drawn = arrays.get("rollout_mark"), arrays.get("rollout_drawn_sum")
    for column in (mark, drawn):
        if column is not None and (column.shape != (count,) or column.dtype.kind != "f"):
            raise ValueError("its marks are not of its rollouts")
    if drawn is not None and (np.isnan(drawn) | (drawn > _ABOVE_ONE)).any():
        raise ValueError("its `rollout_drawn_sum` are no probabilities")
    if mark is not None and np.isinf(mark).any():
        raise ValueError("its `rollout_mark` are no marks")
    has_entropy = "rollout_entropy_sum" in arrays
    return mark, drawn, amounts_in(arrays, "rollout_entropy_sum", (count,)) if has_entropy else None


def _binned(
    arrays: Mapping[str, Array], kind: str, bins: int, tokens: Tokens, compared: bool
) -> tuple[Tokens, Array, Array | None]:
    shape = (*tokens.shape, bins)
    counts = counts_in(arrays, f"{kind}_tokens", shape)
    if (counts.sum(axis=1, dtype=np.int64) != tokens).any():
        raise ValueError(f"its `{kind}_tokens` are not those of its documents")
    losses = numbers_in(arrays, f"{kind}_nll_sum", shape)
    if compared and f"{kind}_kl_sum" not in arrays:
        raise ValueError(f"it lacks `{kind}_kl_sum`")
    kl = amounts_in(arrays, f"{kind}_kl_sum", shape) if compared else None
    return counts.astype(np.int64), losses, kl


def routing_in(arrays: Mapping[str, Array], tokens: Tokens) -> Routing | None:
    if not are_there(arrays, _ROUTING):
        return None
    blocks = arrays["routing_blocks"]
    if blocks.ndim != 1 or not len(blocks):
        raise ValueError("its `routing_blocks` are no layers")
    shape = (len(blocks), *tokens.shape)
    same = counts_in(arrays, "routing_same", shape)
    if (same > tokens).any():
        raise ValueError("its `routing_same` are more than its tokens")
    return Routing(
        counts_in(arrays, "routing_blocks", blocks.shape).astype(np.int64),
        same.astype(np.int64),
        amounts_in(arrays, "routing_moved", shape),
    )
