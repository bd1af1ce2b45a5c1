"""From a plan to an audit over real sockets: what is fetched, when, and what becomes of it."""

import json
from dataclasses import replace
from unittest import mock

import pytest

import qaudit.engine.measure
from qaudit.checkpoints.folder import find_all
from qaudit.errors import HubError, SourceError, UnreachableError
from qaudit.types import Finding
from tests.support.running import run
from tests.support.sample import alone
from tests.support.shelf import STEPS, Looking, numbers, place, plan_of, recipe, shelf, soup

__all__ = ["place", "shelf"]  # fixtures


def test_all_draws_are_measured_while_the_weights_are_there(place):
    series = place.checkpoints("org/series@step10", "org/series@step20")
    schemes = ("gptq-4bit:group=16", "rtn-4bit")
    asked = replace(recipe(repeats=2, calibration_documents=2), schemes=schemes)
    plan = plan_of([alone(c) for c in series], place, recipe=asked)
    audit = place.run(plan, budget=max(c.nbytes for c in series) + 1)
    draws = [(n.subject, n.draws) for n in audit.diagnostics.noise if n.scheme != "fp"]
    assert draws == [("step10", 2), ("step20", 2)]
    names = place.weights("step10", "step20")
    assert sorted(place.fetched(names)) == sorted(names)  # each once
    assert not [n for n in audit.diagnostics.noise if n.numerical is not None]  # a later round's


def test_the_hub_and_the_folders_behind_it_give_the_same_numbers(place):
    series, hub = place.checkpoints()[:3], place.hub()
    over_hub = place.run(plan_of([*map(alone, series), soup(*series[-2:])], place), hub=hub)
    folders = find_all([str(place.root / "hub/org/series" / step) for step in STEPS[:3]])
    text = place.root / "hub/datasets/org/text/v1"
    texts = {name: str(text / f"{name}.jsonl") for name in ("calibration", "evaluation")}
    subjects = [*map(alone, folders), soup(*folders[-2:])]
    plan = plan_of(subjects, None, recipe=recipe(**texts))
    assert numbers(over_hub) == numbers(run(plan, place.out.with_name("local"), place.watch))
    assert len(over_hub.measurements) == 8
    assert not over_hub.skipped
    receipt = {k: v for k, v in over_hub.environment.items() if k.startswith("hub_")}
    assert receipt["hub_nbytes_fetched"] > sum(c.nbytes for c in series)
    assert receipt["hub_nbytes_verified"] >= receipt["hub_nbytes_fetched"]
    assert receipt["hub_requests"] == hub.client.requests > receipt["hub_calls"]
    assert receipt["hub_seconds_waited"] > 0
    assert json.dumps(receipt)


def test_peak_disk_stays_within_the_budget_and_one_shard(place):
    series, names, sizes = place.checkpoints(), place.weights(*STEPS), []
    place.watch.look = lambda: sizes.append(place.nbytes_of_weights(names))
    place.server.log = Looking(place.watch.look)
    budget = 2 * series[0].nbytes
    subjects = [*map(alone, series), soup(series[0], series[3])]
    finding = Finding("QA009", "warn", "step10", None, "two names for one", "leave one out")
    plan = replace(plan_of(subjects, place), findings=(finding,))
    audit = place.run(plan, budget)
    assert finding in audit.findings and audit.plan.findings == (finding,)
    paths = [entry["path"] for entry in place.server.log if entry["method"] == "GET"]
    settings = [k for k, path in enumerate(paths) if path.endswith("/config.json")]
    assert settings  # of all, before weights of any
    assert max(settings) < min(k for k, path in enumerate(paths) if path.split("/")[-1] in names)
    shard = max(file.nbytes for file in series[0].files)
    assert series[0].nbytes < max(sizes) <= budget + shard
    assert place.nbytes_of_weights(names) == 0
    assert not audit.skipped
    assert [s.label for s in audit.subjects] == [s.label for s in subjects]
    assert len(place.fetched(names)) == len(names)  # nothing twice: the soup goes before the rest
    assert not list(place.out.glob("fetched*"))
    place.server.log.clear()
    again = place.run(plan, budget)  # what is measured is not fetched again
    assert (numbers(again), place.server.log) == (numbers(audit), [])
    assert again.environment["hub_nbytes_fetched"] == 0


def test_text_that_cannot_be_had_ends_the_scan_before_any_weights(place):
    plan, names = plan_of([alone(c) for c in place.checkpoints()], place), place.weights(*STEPS)
    place.server.faults.append({"match": r"/evaluation\.jsonl", "status": 404})
    with pytest.raises(HubError, match="evaluation text"):
        place.run(plan)
    assert place.fetched(names) == []
    assert not place.server.asked("GET .*config.json")


def test_two_names_for_one_content_are_fetched_and_measured_once(place, monkeypatch):
    sent = mock.Mock(wraps=qaudit.engine.measure.send)
    monkeypatch.setattr("qaudit.engine.measure.send", sent)
    last, final = place.checkpoints("org/series@step50", "org/final@v1")
    assert last.content == final.content
    names = place.weights("step50")
    audit = place.run(plan_of([alone(last), alone(final)], place), last.nbytes)
    assert [call.args[0].subject.label for call in sent.call_args_list] == ["step50"]
    assert sorted(place.fetched(names)) == sorted(names)
    ce = {score.subject: score.ce for score in audit.measurements if score.spec == "fp"}
    assert ce["step50"] == ce[final.label]
    assert not audit.skipped


# --------------------------------------------------------------------------------------- failures


def test_what_cannot_be_had_is_skipped_and_the_others_are_measured(place):
    series = place.checkpoints()
    plan = plan_of([*map(alone, series), soup(series[1], series[2])], place)
    vanished = {"status": 404, "headers": {"X-Error-Code": "RevisionNotFound"}}
    wrong = series[3].files[0]
    place.server.faults += [
        {"match": f"{series[0].commit}/config.json", "status": 404},
        {"match": f"{series[1].commit}.*safetensors$", **vanished},
        {"match": f"GET /cdn/{wrong.sha256}", "flip": 200},
    ]
    audit = place.run(plan, 2 * series[0].nbytes)
    assert [s.label for s in audit.subjects] == ["step30", "step50"]
    reasons = {s.subject: s.reason for s in audit.skipped}
    assert list(reasons) == ["step10", "step20", "step40", "step20+step30"]
    assert str(series[1].commit) in reasons["step20"]
    assert wrong.name in reasons["step40"] and "step40" in reasons["step40"]
    assert any("wrong hash" in line for line in place.watch.lines)
    assert place.fetched(place.weights("step10")) == []
    assert place.nbytes_of_weights(place.weights(*STEPS)) == 0


def test_when_nothing_can_be_had_the_reasons_are_given(place):
    series = place.checkpoints()[:2]
    place.server.faults.append({"match": r"safetensors$", "status": 404})
    with pytest.raises(SourceError, match=r"measured: `step10`: .*; `step20`: "):
        place.run(plan_of([alone(c) for c in series], place))


def test_a_hub_that_falls_silent_ends_the_scan_and_the_next_one_goes_on(place):
    series, names = place.checkpoints()[:3], place.weights(*STEPS[:3])
    plan = plan_of([alone(c) for c in series], place)
    third = {file.sha256 for file in series[2].files}
    place.server.faults += [
        {"match": f"GET /cdn/({'|'.join(third)})", "reset": 0},
        {"match": "GET /api/.*/revision/", "reset": 0},
    ]
    with pytest.raises(UnreachableError):
        place.run(plan, 3 * series[0].nbytes)
    assert len(list((place.out / "evidence").glob("*.npz"))) == 4  # two subjects, fp and a scheme
    place.server.faults.clear()
    place.server.log.clear()
    audit = place.run(plan, 3 * series[0].nbytes)
    assert set(place.fetched(names)) <= third
    assert len(audit.subjects) == 3
