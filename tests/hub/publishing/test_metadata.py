"""Whose results a repository's metadata may show, and whose models a soup is based on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from qaudit.hub.metadata import Repository, metadata_of
from qaudit.types import AuditRecord, Ref, TextFile
from tests.support import sample

TEXT = TextFile("hf://datasets/o/text/e.jsonl", "o/text", "c" * 40, "e.jsonl", 9, "0" * 64)
HERE = Repository("me/soup", audit_url="https://hub/me/soup/blob/main/qaudit/audit.json")


def audit(pick: str = "soup", home: str | None = "o/run") -> AuditRecord:
    """Return the sample with a pick, its checkpoints in a repository or in folders."""
    made = sample.audit()
    assert made.pick is not None

    def moved(checkpoint: object) -> object:
        ref = Ref(home or "/runs", checkpoint.label)
        return replace(checkpoint, ref=ref, commit=checkpoint.commit if home else None)

    subjects = tuple(
        replace(s, members=tuple((moved(c), w) for c, w in s.members)) for s in made.subjects
    )
    recipe = replace(made.plan.recipe, evaluation=TEXT.source)
    plan = replace(made.plan, recipe=recipe, texts=(TEXT,))
    return replace(made, subjects=subjects, plan=plan, pick=replace(made.pick, subject=pick))


def test_the_soup_that_was_picked_is_a_merge_of_its_members() -> None:
    wanted, notes = metadata_of(audit(), HERE, None)
    assert wanted.base_models == ("o/run",)
    assert len(wanted.results[0]["metrics"]) == 1 + len(sample.SCHEMES)
    assert any("`me/soup` is taken for `soup`" in note for note in notes)


def test_a_member_s_own_repository_is_not_taken_for_the_soup() -> None:
    wanted, notes = metadata_of(audit(), Repository("o/run"), None)
    assert (wanted.base_models, wanted.results, wanted.tags) == ((), (), ("qaudit",))
    assert any("none of those audited" in note for note in notes)


def test_no_model_is_its_own_base() -> None:
    wanted, _ = metadata_of(audit(), Repository("o/run"), "soup")
    assert wanted.results
    assert wanted.base_models == ()


def test_members_that_lie_in_folders_have_no_name_on_the_hub() -> None:
    assert metadata_of(audit(home=None), HERE, None)[0].base_models == ()


def test_a_checkpoint_that_was_picked_is_not_taken_for_weights_nobody_compared() -> None:
    wanted, notes = metadata_of(audit(pick="stage1-step500"), HERE, None)
    assert wanted.results == ()
    assert any("none of those audited" in note for note in notes)


def test_weights_speak_louder_than_the_pick() -> None:
    made = audit()
    other = made.subjects[3]
    there = Repository("me/x", {file.sha256 for file in other.first.files} | {"more"})
    wanted, _ = metadata_of(made, there, None)
    scores = {s.perplexity for s in made.measurements if s.subject == other.label}
    assert {m["value"] for m in wanted.results[0]["metrics"]} == scores
    assert metadata_of(made, replace(there, weights={"more"}), None)[0].results != wanted.results


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_number_that_is_none_is_left_out(value: float) -> None:
    made = audit()
    scores = tuple(
        replace(s, perplexity=value) if (s.subject, s.scheme) == ("soup", "rtn-3bit") else s
        for s in made.measurements
    )
    wanted, _ = metadata_of(replace(made, measurements=scores), HERE, None)
    schemes = [m["args"]["scheme"] for m in wanted.results[0]["metrics"]]
    assert "rtn-3bit" not in schemes
    assert len(schemes) == len(sample.SCHEMES)
