"""What needs several checkpoints of the Hub on the disk at once: a search, and a comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import qaudit.planning.releases
from qaudit.errors import MachineError
from qaudit.families import Family
from qaudit.families.tables import FamilySoup
from qaudit.planning.plan import make_plan
from qaudit.report.plan import render_plan
from qaudit.settings import RunOptions
from qaudit.types import Checkpoint, Plan, Resolved, Subject
from tests.support.series import find_checkpoints
from tests.support.shelf import STEPS, Place, alone, place, plan_of, recipe, shelf

__all__ = ["place", "shelf"]  # fixtures

THREE = STEPS[:3]
GONE = "RevisionNotFound"


def three(place: Place) -> list[Checkpoint]:
    return place.checkpoints(*(f"org/series@{step}" for step in THREE))


def search(*candidates: Checkpoint) -> Subject:
    parts = tuple((c, 1 / len(candidates)) for c in candidates)
    return Subject("best", parts, "greedy:scheme=rtn-4bit")


def release(target: Checkpoint, *members: Checkpoint) -> Subject:
    parts = tuple((c, 1 / len(members)) for c in members)
    return Subject("main rebuilt", ((target, 1.0), *parts), "released:mean")


def content(checkpoints: list[Checkpoint]) -> int:
    return sum(c.nbytes for c in checkpoints)


# ---------------------------------------------------------------------------------------- a search


def test_candidates_lie_on_the_disk_together_and_come_once(place: Place) -> None:
    series, names = three(place), place.weights(*THREE)
    most: list[int] = []
    place.watch.look = lambda: most.append(place.nbytes_of_weights(names))
    plan = plan_of([*map(alone, series), search(*series)], place)
    audit = place.run(plan, budget=content(series))
    assert audit.diagnostics.greedy[0].documents == 4
    assert len(place.fetched(names)) == len(names)
    assert max(most) <= content(series)
    assert not place.nbytes_of_weights(names)


def test_a_search_that_ended_is_gone_through_again_without_a_weight(place: Place) -> None:
    series, names = three(place), place.weights(*THREE)
    plan = plan_of([*map(alone, series), search(*series)], place)
    first = place.run(plan, budget=content(series))
    count = len(place.fetched(names))
    again = place.run(plan, budget=content(series))
    assert again.diagnostics == first.diagnostics
    assert len(place.fetched(names)) == count


def test_candidates_that_do_not_fit_together_are_refused_with_what_would(place: Place) -> None:
    series = three(place)
    plan = plan_of([*map(alone, series), search(*series)], place)
    with pytest.raises(MachineError, match="`best` needs") as refused:
        place.run(plan, budget=content(series[:2]))
    assert "--disk-budget" in refused.value.hint


# ------------------------------------------------------------------------------------ a comparison


def test_a_release_is_compared_while_its_ingredients_lie_beside_it(place: Place) -> None:
    series, names = three(place), place.weights(*THREE)
    plan = plan_of([*map(alone, series)], place, releases=(release(*series),))
    audit = place.run(plan, budget=content(series))
    (row,) = audit.diagnostics.released
    assert (row.released, [m.label for m in row.members]) == ("step10", list(THREE[1:]))
    (finding,) = [f for f in audit.findings if f.rule == "QA019"]
    assert (finding.level, finding.subject) == ("warn", "step10")
    assert len(place.fetched(names)) == len(names)
    assert place.run(plan, budget=content(series)).diagnostics == audit.diagnostics
    assert len(place.fetched(names)) == len(names)


def test_a_release_on_the_hub_that_is_its_soup_is_said_to_be(place: Place, tmp_path: Path) -> None:
    series = three(place)
    folders = [place.root / "hub" / "org" / "series" / step for step in THREE]
    parts = [
        {k: v for file in sorted(f.glob("*.safetensors")) for k, v in load_file(file).items()}
        for f in folders
    ]
    main = tmp_path / "main"
    main.mkdir()
    (main / "config.json").write_bytes((folders[0] / "config.json").read_bytes())
    mean = {name: ((parts[0][name].double() + parts[1][name]) / 2).float() for name in parts[0]}
    save_file(mean, main / "model.safetensors", metadata={"format": "pt"})
    (here,) = find_checkpoints(main)
    plan = plan_of([alone(series[0])], place, releases=(release(here, *series[:2]),))
    (finding,) = [f for f in place.run(plan).findings if f.rule == "QA019"]
    assert finding.message == "`main` equals the mean of `step10` and `step20` exactly"


def test_a_member_that_is_gone_skips_the_comparison_and_nothing_else(place: Place) -> None:
    series = three(place)
    match = f"{series[1].commit}.*safetensors$"
    place.server.faults.append({"match": match, "status": 404, "headers": {"X-Error-Code": GONE}})
    plan = plan_of([*map(alone, series)], place, releases=(release(*series),))
    audit = place.run(plan)
    assert [s.subject for s in audit.skipped] == ["step20", "main rebuilt"]
    assert audit.diagnostics.released == ()


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the family of the series say that its third checkpoint is the mean of the first two."""
    soup = FamilySoup(label="main", of=THREE[:2], target=THREE[2])
    family = Family(family="tiny", description="", soups=(soup,))
    monkeypatch.setattr(qaudit.planning.releases, "family_of", lambda checkpoint, name: family)


@pytest.mark.usefixtures("documented")
def test_a_plan_compares_what_its_disk_holds(place: Place) -> None:
    series = [replace(c, family="tiny") for c in three(place)]
    asked = recipe(context=32)
    subjects = tuple(map(alone, series))
    resolved = Resolved(asked, tuple(series), subjects, plan_of([], place).texts)
    texts = sum(text.nbytes for text in resolved.texts)
    hub = place.hub()

    def plan(budget: int) -> Plan:
        return make_plan(
            asked, hub=hub, resolved=resolved, options=RunOptions(disk_budget=budget + texts)
        )

    wide = plan(content(series))
    assert [[c.label for c, _ in r.members] for r in wide.releases] == [["step30", *THREE[:2]]]
    assert wide.nbytes_read == 2 * content(series)
    narrow = plan(content(series) - 1)
    assert narrow.releases == ()
    assert narrow.nbytes_read == content(series)
    said = " ".join(render_plan(narrow).split())
    assert "step30 is not compared with the soup that it is said to be" in said
    assert "(--disk-budget " in said
    assert narrow.traffic is not None
    assert narrow.traffic.nbytes_disk_peak < content(series) + texts
