"""Evidence as the arrays of a file, and back; older files have no fidelity and no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from qaudit.core.histogram import BINS
from qaudit.types import (
    CHOICES,
    CONFIDENCE_EDGES,
    ByConfidence,
    Evidence,
    Fidelity,
    ImportedAnswers,
    Positions,
    Roles,
    RolloutEvidence,
    Routing,
    TaskEvidence,
)

Array = np.ndarray[Any, Any]
Tokens = npt.NDArray[np.int64]
_Binned = TypeVar("_Binned", Positions, Roles)

_FIDELITY = ("kl_sum", "kl_max", "kl_counts", "same_top", "squared_dp_sum")
_CONFIDENCE = ("confidence_tokens", "confidence_kl_sum", "confidence_flips")
_REFERENCE, _ROLLOUT = "reference_", "rollout_"
_POSITIONS = ("position_edges", "position_tokens", "position_nll_sum")
_ROLES = ("role_names", "role_tokens", "role_nll_sum")
_ROUTING = ("routing_blocks", "routing_same", "routing_moved")
_MOST_POSITIONS, _MOST_ROLES = 64, 32
_DECODING = ("sampled", "greedy")
_ABOVE_ONE = 1e-3  # of a log-probability: rounding in a long sum


def arrays_of(evidence: Evidence) -> dict[str, Array]:
    """Return the arrays of evidence, by the names in the file."""
    arrays = {
        "document_sha256": np.array(evidence.document_sha256),
        "nll_sum": evidence.nll_sum,
        "tokens": evidence.tokens,
        "bytes": evidence.nbytes,
        "split": np.array(evidence.split),
    }
    if evidence.expert_tokens is not None:
        arrays["expert_tokens"] = evidence.expert_tokens
    if evidence.output_error is not None:
        arrays["output_error"] = evidence.output_error
    if evidence.routing is not None:
        arrays |= {f"routing_{name}": value for name, value in vars(evidence.routing).items()}
    if evidence.strata:
        arrays["strata"] = np.array(evidence.strata)
    for task in evidence.tasks:  # at most one: each task has a file of its own
        arrays |= _task_arrays(task)
    if evidence.reference is not None:
        beside = _fidelity_arrays(evidence.reference)
        arrays |= {f"{_REFERENCE}{name}": array for name, array in beside.items()}
    if evidence.roles is not None:
        roles = {f"role_{name}": value for name, value in vars(evidence.roles).items()}
        arrays |= {name: np.array(value) for name, value in roles.items() if value is not None}
    if evidence.rollouts is not None:
        rollouts = dict(vars(evidence.rollouts))
        for kind in ("position", "role"):
            binned = rollouts.pop(f"{kind}s")
            rollouts |= {f"{kind}_{n}": v for n, v in vars(binned).items()} if binned else {}
        arrays |= {f"{_ROLLOUT}{n}": np.array(v) for n, v in rollouts.items() if v is not None}
    return arrays | _sums(evidence.fidelity, evidence.positions)


def _task_arrays(one: TaskEvidence) -> dict[str, np.ndarray]:
    first = np.full(int(one.items.max(initial=-1)) + 1, -1, dtype=np.int64)
    place_P = np.arange(len(one.items)) - np.searchsorted(one.items, one.items)
    for item, place in zip(one.items[one.right][::-1], place_P[one.right][::-1], strict=True):
        first[item] = place
    return {
        "choice_task": np.array([one.task]),
        "choice_nll": one.nll,
        "choice_items": one.items,
        "choice_answers": first,  # of several right ones the first, as earlier versions read it
        "choice_right": one.right,
        "choice_greedy": one.greedy,
        **(_imported_arrays(one.imported) if one.imported else {}),
    }


def _imported_arrays(imported: ImportedAnswers) -> dict[str, np.ndarray]:
    texts = [imported.tool, imported.metric, _DECODING[imported.greedy], imported.items_sha256]
    return {"imported": np.array(texts), "imported_picks": imported.picked_N}


def evidence_in(arrays: Mapping[str, Array]) -> Evidence:
    """Read evidence; ValueError for what cannot be."""
    documents = _column(arrays, "document_sha256", "U")
    count = len(documents)
    tokens = _whole(arrays, "tokens", count)
    fidelity = _fidelity(arrays, tokens)
    return Evidence(
        document_sha256=tuple(map(str, documents)),
        nll_sum=_column(arrays, "nll_sum", "f", count),
        tokens=tokens,
        nbytes=_whole(arrays, "bytes", count),
        split=tuple(map(str, _column(arrays, "split", "U", count))),
        strata=_strata(arrays, count),
        tasks=(_task_evidence(arrays),) if "choice_nll" in arrays else (),
        fidelity=fidelity,
        positions=_positions(arrays, tokens, compared=fidelity is not None),
        expert_tokens=_expert_tokens(arrays),
        routing=_routing(arrays, tokens),
        output_error=_amounts(arrays, "output_error", tokens.shape)
        if "output_error" in arrays
        else None,
        reference=_fidelity(_behind(_REFERENCE, arrays), tokens),
        roles=_roles(arrays, tokens, compared=fidelity is not None),
        rollouts=_rollouts(arrays) if "rollout_prompt" in arrays else None,
    )


def _expert_tokens(arrays: Mapping[str, Array]) -> Tokens | None:
    if "expert_tokens" not in arrays:
        return None
    counts = arrays["expert_tokens"]
    if counts.ndim != 2 or counts.dtype.kind not in "iu" or (counts < -1).any():
        raise ValueError("its `expert_tokens` are no counts")
    return counts.astype(np.int64)


def _task_evidence(arrays: Mapping[str, Array]) -> TaskEvidence:
    """Return the options of a task; the first version had one task and one right option."""
    nll = _column(arrays, "choice_nll", "f")
    count = len(nll)
    items = _column(arrays, "choice_items", "iu", count)
    answers = _column(arrays, "choice_answers", "iu")
    if items.tolist() != sorted(items.tolist()) or set(items.tolist()) != set(range(len(answers))):
        raise ValueError("its choices are not those of its items")
    if "choice_task" not in arrays:
        place = np.arange(count) - np.searchsorted(items, items)
        right, greedy = place == answers[items], np.zeros(count, dtype=np.bool_)
        return TaskEvidence(CHOICES, nll, items, right, greedy)
    (name,) = _column(arrays, "choice_task", "U", 1)
    right, greedy = (_column(arrays, c, "b", count) for c in ("choice_right", "choice_greedy"))
    return TaskEvidence(str(name), nll, items, right, greedy, _imported(arrays, len(answers)))


def _imported(arrays: Mapping[str, Array], count: int) -> ImportedAnswers | None:
    if "imported" not in arrays:
        return None
    tool, metric, decoding, items = map(str, _column(arrays, "imported", "U", 4))
    picked = _column(arrays, "imported_picks", "iu", count)
    if decoding not in _DECODING or len(arrays["choice_nll"]) != count:
        raise ValueError("its imported answers are not one for each item")
    return ImportedAnswers(tool, metric, decoding == _DECODING[True], items, picked)


def _strata(arrays: Mapping[str, Array], count: int) -> tuple[str, ...]:
    if "strata" not in arrays:
        return ()
    return tuple(map(str, _column(arrays, "strata", "U", count)))


def _column(arrays: Mapping[str, Array], name: str, kinds: str, count: int | None = None) -> Array:
    """Return a column of the right kind and length; statistics take it as it is."""
    if name not in arrays:
        raise ValueError(f"it lacks `{name}`")
    column = arrays[name]
    if column.ndim != 1 or (column.size and column.dtype.kind not in kinds):
        raise ValueError(f"its `{name}` is no column of such values")
    if count is not None and len(column) != count:
        raise ValueError("it holds columns of different lengths")
    return column


def _whole(arrays: Mapping[str, Array], name: str, count: int) -> Array:
    return _not_negative(_column(arrays, name, "iu", count), name)


# --------------------------------------------------------------------- sums by document


def _sums(fidelity: Fidelity | None, positions: Positions | None) -> dict[str, Array]:
    """Return the arrays that are there, by the names in the file."""
    arrays: dict[str, Array | None] = {}
    if fidelity is not None:
        arrays |= _fidelity_arrays(fidelity)
    if positions is not None:
        arrays |= {f"position_{name}": value for name, value in vars(positions).items()}
    return {name: value for name, value in arrays.items() if value is not None}


def _fidelity_arrays(fidelity: Fidelity) -> dict[str, Array]:
    arrays = {name: getattr(fidelity, name) for name in _FIDELITY}
    if fidelity.by_confidence is not None:
        sums = vars(fidelity.by_confidence)
        arrays |= {f"confidence_{name}": array for name, array in sums.items()}
    return arrays


def _fidelity(arrays: Mapping[str, Array], tokens: Tokens) -> Fidelity | None:
    """Read what a stream differs from full precision by; ValueError for what cannot be."""
    if not _are_there(arrays, _FIDELITY):
        return None
    shape = tokens.shape
    counts = _counts(arrays, "kl_counts", (*shape, BINS))
    same_top = _counts(arrays, "same_top", shape)
    if (counts.sum(axis=1, dtype=np.int64) != tokens).any():
        raise ValueError("its `kl_counts` are not of its tokens")
    if (same_top > tokens).any():
        raise ValueError("its `same_top` are more than its tokens")
    return Fidelity(
        kl_sum=_amounts(arrays, "kl_sum", shape),
        kl_max=_amounts(arrays, "kl_max", shape),
        kl_counts=counts,
        same_top=same_top,
        squared_dp_sum=_amounts(arrays, "squared_dp_sum", shape),
        by_confidence=_by_confidence(arrays, tokens, same_top),
    )


def _by_confidence(
    arrays: Mapping[str, Array], tokens: Tokens, same_top: Array
) -> ByConfidence | None:
    """Read the sums by confidence, which older files do not have."""
    if not _are_there(arrays, _CONFIDENCE):
        return None
    shape = (*tokens.shape, len(CONFIDENCE_EDGES) + 1)
    counts = _counts(arrays, "confidence_tokens", shape)
    flips = _counts(arrays, "confidence_flips", shape)
    if (counts.sum(axis=1, dtype=np.int64) != tokens).any() or (flips > counts).any():
        raise ValueError("its `confidence_tokens` are not of its tokens")
    if (flips.sum(axis=1, dtype=np.int64) != tokens - same_top).any():
        raise ValueError("its `confidence_flips` are not those of `same_top`")
    return ByConfidence(
        counts.astype(np.int64),
        _amounts(arrays, "confidence_kl_sum", shape),
        flips.astype(np.int64),
    )


def _behind(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {n.removeprefix(prefix): arrays[n] for n in arrays if n.startswith(prefix)}


def _positions(arrays: Mapping[str, Array], tokens: Tokens, *, compared: bool) -> Positions | None:
    """Read the sums by position in the window; ValueError for what cannot be."""
    if not _are_there(arrays, _POSITIONS):
        return None
    edges = arrays["position_edges"]
    if edges.ndim != 1 or edges.dtype.kind not in "iu" or not 2 <= len(edges) <= _MOST_POSITIONS:
        raise ValueError("its `position_edges` are no bins")
    if edges[0] != 0 or (np.diff(edges.astype(np.int64)) <= 0).any():
        raise ValueError("its `position_edges` do not rise from 0")
    return Positions(
        edges.astype(np.int64), *_binned(arrays, "position", len(edges) - 1, tokens, compared)
    )


def _roles(arrays: Mapping[str, Array], tokens: Tokens, *, compared: bool) -> Roles | None:
    """Read the sums by role in a conversation; ValueError for what cannot be."""
    if not _are_there(arrays, _ROLES):
        return None
    names = tuple(map(str, _column(arrays, "role_names", "U")))
    if not 1 <= len(names) <= _MOST_ROLES or len(set(names)) < len(names):
        raise ValueError("its `role_names` are no roles")
    return Roles(names, *_binned(arrays, "role", len(names), tokens, compared))


def _rollouts(arrays: Mapping[str, Array]) -> RolloutEvidence:
    """Read the sums of each sample; ValueError for what cannot be."""
    prompt = _whole(arrays, "rollout_prompt", len(_column(arrays, "rollout_prompt", "iu")))
    count = len(prompt)
    tokens = _whole(arrays, "rollout_tokens", count)
    agreed = _column(arrays, "rollout_agreed", "i", count)
    if (agreed < -1).any() or (agreed > tokens).any():
        raise ValueError("its `rollout_agreed` are not of its tokens")
    if "rollout_sha256" not in arrays:
        raise ValueError("it lacks `rollout_sha256`")
    names = tuple(map(str, _column(arrays, "rollout_end_names", "U")))
    for name in ("rollout_nll_sum", "rollout_end_sum"):
        if name not in arrays:
            raise ValueError(f"it lacks `{name}`")
    has_kl = "rollout_kl_sum" in arrays
    of_rollouts = _behind(_ROLLOUT, arrays)
    positions = _positions(of_rollouts, tokens, compared=has_kl)
    roles = _roles(of_rollouts, tokens, compared=has_kl)
    return RolloutEvidence(
        _text(arrays, "rollout_sha256"),
        prompt.astype(np.int64),
        tokens.astype(np.int64),
        _numbers(arrays, "rollout_nll_sum", (count,)),
        agreed.astype(np.int64),
        names,
        _amounts(arrays, "rollout_end_sum", (count, len(names))),
        _amounts(arrays, "rollout_kl_sum", (count,)) if has_kl else None,
        *_marks(arrays, count),
        _text(arrays, "rollout_weights_sha256"),
        _text(arrays, "rollout_unweighed"),
        positions and _with_ends(positions, "position", of_rollouts, len(names)),
        roles and _with_ends(roles, "role", of_rollouts, len(names)),
    )


def _with_ends(binned: _Binned, kind: str, arrays: Mapping[str, Array], groups: int) -> _Binned:
    """Return sums by bin with those of ends."""
    name = f"{kind}_end_sum"
    if name not in arrays:
        raise ValueError(f"it lacks `{_ROLLOUT}{name}`")
    return replace(binned, end_sum=_amounts(arrays, name, (*binned.tokens.shape, groups)))


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
    return mark, drawn, _amounts(arrays, "rollout_entropy_sum", (count,)) if has_entropy else None


def _text(arrays: Mapping[str, Array], name: str) -> str:
    text = arrays.get(name, np.array(""))
    if text.shape != () or text.dtype.kind != "U":
        raise ValueError(f"its `{name}` is no text")
    return str(text)


def _binned(
    arrays: Mapping[str, Array], kind: str, bins: int, tokens: Tokens, compared: bool
) -> tuple[Tokens, Array, Array | None]:
    """Read the tokens, losses and divergences of each document by bin."""
    shape = (*tokens.shape, bins)
    counts = _counts(arrays, f"{kind}_tokens", shape)
    if (counts.sum(axis=1, dtype=np.int64) != tokens).any():
        raise ValueError(f"its `{kind}_tokens` are not those of its documents")
    losses = _numbers(arrays, f"{kind}_nll_sum", shape)
    if compared and f"{kind}_kl_sum" not in arrays:
        raise ValueError(f"it lacks `{kind}_kl_sum`")
    kl = _amounts(arrays, f"{kind}_kl_sum", shape) if compared else None
    return counts.astype(np.int64), losses, kl


def _routing(arrays: Mapping[str, Array], tokens: Tokens) -> Routing | None:
    """Read the choices of experts; ValueError for what cannot be."""
    if not _are_there(arrays, _ROUTING):
        return None
    blocks = arrays["routing_blocks"]
    if blocks.ndim != 1 or not len(blocks):
        raise ValueError("its `routing_blocks` are no layers")
    shape = (len(blocks), *tokens.shape)
    same = _counts(arrays, "routing_same", shape)
    if (same > tokens).any():
        raise ValueError("its `routing_same` are more than its tokens")
    return Routing(
        _counts(arrays, "routing_blocks", blocks.shape).astype(np.int64),
        same.astype(np.int64),
        _amounts(arrays, "routing_moved", shape),
    )


def _are_there(arrays: Mapping[str, Array], names: tuple[str, ...]) -> bool:
    absent = [name for name in names if name not in arrays]
    if 0 < len(absent) < len(names):
        raise ValueError(f"it lacks `{absent[0]}`")
    return not absent


def _numbers(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    """Return numbers of this shape; a loss may be infinite."""
    array = arrays[name]
    if array.shape != shape or (array.size and array.dtype.kind != "f"):
        raise ValueError(f"its `{name}` is no array of such values")
    return array


def _amounts(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    array = _numbers(arrays, name, shape)
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"its `{name}` is not finite, or below zero")
    return array


def _counts(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    array = arrays[name]
    if array.shape != shape or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"its `{name}` is no array of counts")
    return _not_negative(array, name)


def _not_negative(array: Array, name: str) -> Array:
    if (array < 0).any():
        raise ValueError(f"its `{name}` are below zero")
    return array
