"""The doctor looks at what is there, says what is not, and never shows a token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qaudit.cli.app import app
from qaudit.core.registry import schemes
from qaudit.core.schemes.rtn import RoundToNearest
from qaudit.engine.doctor import EXAMPLE_REPO, Fact, examine
from tests.support.hub import Hub

run = CliRunner()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "hub").mkdir()
    return Hub(tmp_path / "hub", tokens={"hf_secret": "bob"})


def about(name: str, facts: tuple[Fact, ...]) -> Fact:
    return next(fact for fact in facts if fact.name == name)


def test_a_hub_that_answers_is_reached_whatever_it_answers(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub.running():
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        facts = examine()
        assert about("endpoint", facts).value == hub.url
    assert about("reached", facts).value.startswith("yes")
    assert EXAMPLE_REPO in about("reached", facts).value  # it is not there, and that is said
    assert about("token", facts).value == "present"
    assert "hf_secret" not in repr(facts)
    assert len(hub.log) == 1


def test_a_hub_that_is_not_there_is_no_fault_of_this_machine(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    reached = about("reached", examine())
    assert reached.state == "without"
    assert "127.0.0.1:9" in reached.value


def test_a_scheme_that_does_not_run_is_a_fault_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: object, linears: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(RoundToNearest, "quantize", broken)
    answer = run.invoke(app, ["doctor", "--json"])
    assert answer.exit_code == 4
    facts = json.loads(answer.stdout)["facts"]
    assert {f["name"] for f in facts if f["state"] == "fault"} == {"rtn", "rtn-mix"}
    assert next(f for f in facts if f["name"] == "reached")["state"] == "without"  # offline here


def test_what_is_not_installed_says_how_to_install_it() -> None:
    missing = [f for f in examine() if f.about == "libraries" and f.state == "without"]
    assert all("pip install" in f.hint or "torch" in f.hint for f in missing)


def test_one_scheme_of_each_kind_quantizes() -> None:
    (quantizes,) = (fact for fact in examine() if fact.about == "schemes")
    assert quantizes.value.split(", ") == sorted(n for n, s in schemes().items() if not s.extra)
    assert {"gptq", "awq", "smoothquant", "spinquant"} <= {*quantizes.value.split(", ")}
