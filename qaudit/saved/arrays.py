"""Evidence as the arrays of a file, and back; older files have no fidelity and no positions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qaudit.saved.sums import (
    REFERENCE,
    ROLLOUT,
    Array,
    Tokens,
    amounts_in,
    behind,
    column_in,
    fidelity_arrays,
    fidelity_in,
    positions_in,
    roles_in,
    rollouts_in,
    routing_in,
    sums_arrays,
    whole_numbers,
)
from qaudit.types import CHOICES, Evidence, ImportedAnswers, TaskEvidence

_DECODING = ("sampled", "greedy")


def arrays_of(evidence: Evidence) -> dict[str, Array]:
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
        beside = fidelity_arrays(evidence.reference)
        arrays |= {f"{REFERENCE}{name}": array for name, array in beside.items()}
    if evidence.roles is not None:
        roles = {f"role_{name}": value for name, value in vars(evidence.roles).items()}
        arrays |= {name: np.array(value) for name, value in roles.items() if value is not None}
    if evidence.rollouts is not None:
        rollouts = dict(vars(evidence.rollouts))
        for kind in ("position", "role"):
            binned = rollouts.pop(f"{kind}s")
            rollouts |= {f"{kind}_{n}": v for n, v in vars(binned).items()} if binned else {}
        arrays |= {f"{ROLLOUT}{n}": np.array(v) for n, v in rollouts.items() if v is not None}
    return arrays | sums_arrays(evidence.fidelity, evidence.positions)


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
    documents = column_in(arrays, "document_sha256", "U")
    count = len(documents)
    tokens = whole_numbers(arrays, "tokens", count)
    fidelity = fidelity_in(arrays, tokens)
    return Evidence(
        document_sha256=tuple(map(str, documents)),
        nll_sum=column_in(arrays, "nll_sum", "f", count),
        tokens=tokens,
        nbytes=whole_numbers(arrays, "bytes", count),
        split=tuple(map(str, column_in(arrays, "split", "U", count))),
        strata=_strata(arrays, count),
        tasks=(_task_evidence(arrays),) if "choice_nll" in arrays else (),
        fidelity=fidelity,
        positions=positions_in(arrays, tokens, compared=fidelity is not None),
        expert_tokens=_expert_tokens(arrays),
        routing=routing_in(arrays, tokens),
        output_error=amounts_in(arrays, "output_error", tokens.shape)
        if "output_error" in arrays
        else None,
        reference=fidelity_in(behind(REFERENCE, arrays), tokens),
        roles=roles_in(arrays, tokens, compared=fidelity is not None),
        rollouts=rollouts_in(arrays) if "rollout_prompt" in arrays else None,
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
    nll = column_in(arrays, "choice_nll", "f")
    count = len(nll)
    items = column_in(arrays, "choice_items", "iu", count)
    answers = column_in(arrays, "choice_answers", "iu")
    if items.tolist() != sorted(items.tolist()) or set(items.tolist()) != set(range(len(answers))):
        raise ValueError("its choices are not those of its items")
    if "choice_task" not in arrays:
        place = np.arange(count) - np.searchsorted(items, items)
        right, greedy = place == answers[items], np.zeros(count, dtype=np.bool_)
        return TaskEvidence(CHOICES, nll, items, right, greedy)
    (name,) = column_in(arrays, "choice_task", "U", 1)
    right, greedy = (column_in(arrays, c, "b", count) for c in ("choice_right", "choice_greedy"))
    return TaskEvidence(str(name), nll, items, right, greedy, _imported(arrays, len(answers)))


def _imported(arrays: Mapping[str, Array], count: int) -> ImportedAnswers | None:
    if "imported" not in arrays:
        return None
    tool, metric, decoding, items = map(str, column_in(arrays, "imported", "U", 4))
    picked = column_in(arrays, "imported_picks", "iu", count)
    if decoding not in _DECODING or len(arrays["choice_nll"]) != count:
        raise ValueError("its imported answers are not one for each item")
    return ImportedAnswers(tool, metric, decoding == _DECODING[True], items, picked)


def _strata(arrays: Mapping[str, Array], count: int) -> tuple[str, ...]:
    if "strata" not in arrays:
        return ()
    return tuple(map(str, column_in(arrays, "strata", "U", count)))
