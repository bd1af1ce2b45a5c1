"""Evidence as the columns of a file, and back; each column is checked by its line in `COLUMNS`.

The dataclasses of `qaudit.types` name the columns, and a part of one has a prefix. A line says what
a column holds and its shape. Values: `amount` is finite and not below zero, `loss` may be infinite,
`count` is not below zero, `stored` is a count in the dtype of the file. Shapes: D documents or
samples, H bins of the histogram, C buckets of confidence, B bins or roles, G groups of tokens that
end something, L layers of experts, `*` any. With a `?` a column may be absent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from qaudit.core.statistics import BINS
from qaudit.types import (
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
Arrays = Mapping[str, Array]

_SUMS = {
    "tokens": "count DB",
    "nll_sum": "loss DB",
    "kl_sum": "amount DB?",
    "end_sum": "amount DBG?",
}
COLUMNS: dict[type, dict[str, str]] = {
    Evidence: {
        "document_sha256": "text *", "nll_sum": "loss D", "tokens": "count D", "bytes": "count D",
        "strata": "text D?", "output_error": "amount D?",
        "expert_tokens": "whole **?",
    },
    Fidelity: {
        "kl_sum": "amount D", "kl_max": "amount D", "kl_counts": "stored DH", "same_top": "count D",
        "squared_dp_sum": "amount D",
    },
    ByConfidence: {"tokens": "count DC", "kl_sum": "amount DC", "flips": "count DC"},
    Positions: {"edges": "count *", **_SUMS},
    Roles: {"names": "text *", **_SUMS},
    Routing: {"blocks": "count *", "same": "count LD", "moved": "amount LD"},
    RolloutEvidence: {
        "sha256": "text ", "prompt": "count *", "tokens": "count D", "nll_sum": "loss D",
        "agreed": "whole D", "end_names": "text *", "end_sum": "amount DG", "kl_sum": "amount D?",
        "mark": "loss D?", "drawn_sum": "loss D?", "entropy_sum": "amount D?",
        "weights_sha256": "text ?", "unweighed": "text ?",
    },
    TaskEvidence: {
        "task": "text *", "nll": "loss *", "items": "count P", "answers": "whole *",
        "right": "flag P", "greedy": "flag P",
    },
    ImportedAnswers: {"imported": "text *", "imported_picks": "whole P"},
}  # fmt: skip
_DTYPES = {"text": "U", "loss": "f", "amount": "f", "flag": "b"}  # all others are whole numbers
_PREFIXES = {
    "fidelity": "", "by_confidence": "confidence_", "positions": "position_", "roles": "role_",
    "routing": "routing_", "reference": "reference_", "rollouts": "rollout_",
}  # fmt: skip
_DECODING = ("sampled", "greedy")
_ABOVE_ONE = 1e-3  # of a log-probability: rounding in a long sum


def arrays_of(evidence: Evidence) -> dict[str, Array]:
    arrays = _columns(evidence)
    for task in evidence.tasks:  # at most one: each task has a file of its columns
        first = np.full(int(task.items.max(initial=-1)) + 1, -1, dtype=np.int64)
        place_P = np.arange(len(task.items)) - np.searchsorted(task.items, task.items)
        right = task.items[task.right], place_P[task.right]
        for item, place in zip(*(part[::-1] for part in right), strict=True):
            first[item] = place  # of several right ones the first
        columns = {"task": np.array([task.task]), "nll": task.nll, "items": task.items}
        columns |= {"answers": first, "right": task.right, "greedy": task.greedy}
        arrays |= {f"choice_{name}": array for name, array in columns.items()}
        if (imported := task.imported) is not None:
            decoding = _DECODING[imported.greedy]
            texts = [imported.tool, imported.metric, decoding, imported.items_sha256]
            arrays |= {"imported": np.array(texts), "imported_picks": imported.picked_N}
    return arrays


def _columns(value: Any, prefix: str = "") -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for name, part in vars(value).items():
        if is_dataclass(part):
            arrays |= _columns(part, prefix + _PREFIXES[name])
        elif part is not None and name != "tasks" and (name, part) != ("strata", ()):
            arrays[prefix + {"nbytes": "bytes"}.get(name, name)] = np.array(part)
    return arrays


def evidence_in(arrays: Arrays) -> Evidence:
    """Read evidence; ValueError for what cannot be."""
    sizes = {"H": BINS, "C": len(CONFIDENCE_EDGES) + 1}
    columns = _read(Evidence, arrays, "", sizes, "D")
    if columns is None:
        raise ValueError("it lacks `document_sha256`")
    columns["nbytes"], tokens = columns.pop("bytes"), columns["tokens"]
    _must((columns.get("expert_tokens", tokens) >= -1).all(), "expert_tokens", "are no counts")
    fidelity = _fidelity(arrays, "", sizes, tokens)
    also = {"kl_sum"} if fidelity is not None else set()
    return Evidence(
        **columns,
        tasks=_tasks(arrays),
        fidelity=fidelity,
        positions=_binned(Positions, arrays, "position_", sizes, tokens, also),
        roles=_binned(Roles, arrays, "role_", sizes, tokens, also),
        routing=_routing(arrays, sizes, tokens),
        reference=_fidelity(arrays, "reference_", sizes, tokens),
        rollouts=_rollouts(arrays, sizes),
    )


def _read(
    kind: type,
    arrays: Arrays,
    prefix: str,
    sizes: dict[str, int],
    measure: str = "",
    also: Collection[str] | None = None,
) -> dict[str, Any] | None:
    """Return the columns of a group; None where all are absent that must be there.

    Those that may be absent are read if they are there, or where `also` names them. The length of
    the first column of any length becomes the size `measure`.
    """
    present = {n for n in COLUMNS[kind] if prefix + n in arrays} if also is None else also
    table = {n: w for n, w in COLUMNS[kind].items() if not w.endswith("?") or n in present}
    if not any(prefix + n in arrays for n in table if not COLUMNS[kind][n].endswith("?")):
        return None
    values: dict[str, Any] = {}
    for name, (value, _, shape) in ((n, what.partition(" ")) for n, what in table.items()):
        key = prefix + name
        if key not in arrays:
            raise ValueError(f"it lacks `{key}`")
        array, letters = arrays[key], shape.rstrip("?")
        fits = array.ndim == len(letters) and all(
            size == sizes.get(letter, size)
            for letter, size in zip(letters, array.shape, strict=True)
        )
        is_kind = not array.size or array.dtype.kind in _DTYPES.get(value, "iu")
        _must(fits and is_kind, key, "is no column of such values")
        if measure not in sizes and letters == "*":
            sizes[measure] = len(array)
        if value == "text":
            values[name] = tuple(map(str, array)) if letters else str(array)
            continue
        if value == "amount":
            _must((np.isfinite(array) & (array >= 0)).all(), key, "is not finite, or below zero")
        _must(value not in ("count", "stored") or (array >= 0).all(), key, "are below zero")
        is_whole = value in ("count", "whole")
        values[name] = array.astype(np.int64, copy=False) if is_whole else array
    return values


def _must(holds: object, name: str, wrong: str) -> None:
    if not holds:
        raise ValueError(f"its `{name}` {wrong}")


def _fidelity(arrays: Arrays, prefix: str, sizes: dict[str, int], tokens: Array) -> Fidelity | None:
    if (values := _read(Fidelity, arrays, prefix, sizes)) is None:
        return None
    changed = tokens - values["same_top"]
    _must((values["kl_counts"].sum(1, dtype=np.int64) == tokens).all(), "kl_counts", _OTHER_TOKENS)
    _must((changed >= 0).all(), "same_top", "are more than its tokens")
    if (confidence := _read(ByConfidence, arrays, f"{prefix}confidence_", sizes)) is None:
        return Fidelity(**values)
    counts, flips = confidence["tokens"], confidence["flips"]
    right = (counts.sum(1) == tokens).all() and (flips <= counts).all()
    _must(right, "confidence_tokens", _OTHER_TOKENS)
    _must((flips.sum(1) == changed).all(), "confidence_flips", "are not those of `same_top`")
    return Fidelity(**values, by_confidence=ByConfidence(**confidence))


_OTHER_TOKENS = "are not of its tokens"


def _binned(
    kind: type[Any],
    arrays: Arrays,
    prefix: str,
    sizes: dict[str, int],
    tokens: Array,
    also: Collection[str],
) -> Any:
    """Read sums by position or by role."""
    if kind is Roles:
        values = _read(Roles, arrays, prefix, sizes := {**sizes}, "B", also)
        imported = () if values is None else values["names"]
        _must(
            len(imported) <= 32 and len(set(imported)) == len(imported),
            f"{prefix}names",
            "are no roles",
        )
    else:
        edges = arrays.get(f"{prefix}edges", np.zeros(0))
        values = _read(Positions, arrays, prefix, {**sizes, "B": len(edges) - 1}, "", also)
        rises = values is None or (edges[0] == 0 and (np.diff(values["edges"]) > 0).all())
        _must(values is None or (2 <= len(edges) <= 64 and rises), f"{prefix}edges", "are no bins")
    if values is None:
        return None
    _must((values["tokens"].sum(1) == tokens).all(), f"{prefix}tokens", _OTHER_TOKENS)
    return kind(**values)


def _routing(arrays: Arrays, sizes: dict[str, int], tokens: Array) -> Routing | None:
    if (values := _read(Routing, arrays, "routing_", {**sizes}, "L")) is None:
        return None
    right = len(values["blocks"]) and (values["same"] <= tokens).all()
    _must(right, "routing_same", "are more than its tokens")
    return Routing(**values)


def _rollouts(arrays: Arrays, sizes: dict[str, int]) -> RolloutEvidence | None:
    groups = arrays.get("rollout_end_names", np.zeros(0)).size
    samples = {key: size for key, size in sizes.items() if key != "D"} | {"G": groups}
    if (values := _read(RolloutEvidence, arrays, "rollout_", samples, "D")) is None:
        return None
    tokens, agreed = values["tokens"], values["agreed"]
    _must(((agreed >= -1) & (agreed <= tokens)).all(), "rollout_agreed", _OTHER_TOKENS)
    _must(not np.isinf(values.get("mark", 0)).any(), "rollout_mark", "are no marks")
    drawn = values.get("drawn_sum", np.zeros(0))
    _must((drawn <= _ABOVE_ONE).all(), "rollout_drawn_sum", "are no probabilities")  # nor NaN
    also = {"end_sum"} | ({"kl_sum"} & values.keys())
    return RolloutEvidence(
        **values,
        positions=_binned(Positions, arrays, "rollout_position_", samples, tokens, also),
        roles=_binned(Roles, arrays, "rollout_role_", samples, tokens, also),
    )


def _tasks(arrays: Arrays) -> tuple[TaskEvidence, ...]:
    sizes = {"P": len(arrays.get("choice_nll", ()))}
    if (values := _read(TaskEvidence, arrays, "choice_", sizes)) is None:
        return ()
    (values["task"],), items, answers = values["task"], values["items"], values.pop("answers")
    whole = (np.diff(items) >= 0).all() and set(items.tolist()) == set(range(len(answers)))
    _must(whole, "choice_items", "are not those of its answers")
    imported = _read(ImportedAnswers, arrays, "", {"P": len(answers)})
    if imported is None:
        return (TaskEvidence(**values),)
    tool, metric, decoding, sha256 = imported["imported"]
    right = decoding in _DECODING and len(items) == len(answers)
    _must(right, "imported", "are not one answer for each item")
    picks, is_greedy = imported["imported_picks"], decoding == _DECODING[True]
    return (
        TaskEvidence(**values, imported=ImportedAnswers(tool, metric, is_greedy, sha256, picks)),
    )
