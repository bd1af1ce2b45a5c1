"""The doctor looks at what is there, multiplies on a GPU, and never shows a token."""

import json
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from qaudit.cli.app import app
from qaudit.core.registry import schemes
from qaudit.core.schemes.nearest import RoundToNearest
from qaudit.engine import doctor
from qaudit.engine.doctor import EXAMPLE_REPO, _speed, examine
from qaudit.planning import price
from tests.support.hub import Hub

run = CliRunner()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "hub").mkdir()
    return Hub(tmp_path / "hub", tokens={"hf_secret": "bob"})


def test_a_hub_is_reached_none_is_no_fault_and_schemes_quantize(hub, monkeypatch):
    with hub.running():
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        facts = {fact.name: fact for fact in examine()}
        assert facts["endpoint"].value == hub.url
    assert facts["reached"].value.startswith("yes")
    assert EXAMPLE_REPO in facts["reached"].value  # it is not there, and that is said
    assert facts["token"].value == "present"
    assert "hf_secret" not in repr(facts)
    assert len(hub.log) == 1
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    there = examine()
    (reached,) = (fact for fact in there if fact.name == "reached")
    assert reached.state == "without"
    assert "127.0.0.1:9" in reached.value
    missing = [f for f in there if f.about == "libraries" and f.state == "without"]
    assert all("pip install" in f.hint or "torch" in f.hint for f in missing)
    (quantizes,) = (fact for fact in there if fact.about == "schemes")
    assert quantizes.value.split(", ") == sorted(n for n, s in schemes().items() if not s.extra)
    assert {"gptq", "awq", "smoothquant", "spinquant"} <= {*quantizes.value.split(", ")}


def test_a_scheme_that_does_not_run_is_a_fault_and_the_exit_code(monkeypatch):
    broken = mock.Mock(side_effect=RuntimeError("no kernel image"))
    monkeypatch.setattr(RoundToNearest, "quantize", broken)
    answer = run.invoke(app, ["doctor", "--json"])
    assert answer.exit_code == 4
    facts = json.loads(answer.stdout)["facts"]
    assert {f["name"] for f in facts if f["state"] == "fault"} == {"rtn", "rtn-mix"}
    assert next(f for f in facts if f["name"] == "reached")["state"] == "without"  # offline here


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(doctor, "_SIDE", 16)


def test_doctor_says_what_a_7b_would_take_or_what_is_wrong():
    broken = mock.Mock(side_effect=RuntimeError("CUDA error:\nno"))
    speed = "500 TFLOP/s: forward passes of a default audit of a 7B model in 33 s"
    for seconds, expected in (
        (lambda *_: 2.0 * 16**3 / 5e14, ("ok", speed)),
        (broken, ("fault", "does not run there: CUDA error: no")),
    ):
        with mock.patch.object(doctor, "_seconds", seconds):
            fact = _speed(torch.device("cuda"), torch.bfloat16)
        assert (fact.state, fact.value) == expected


def test_a_gpu_is_priced_by_its_name():
    for name, dtype, rate in (
        ("NVIDIA H100 80GB HBM3", "bfloat16", 4.9e14),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 0.8e14),
        ("NVIDIA L4", "float32", 1.5e13),
        ("NVIDIA L40S", "bfloat16", 1.8e14),
        ("a name of tomorrow", "bfloat16", 1e14),
        (None, "float32", 2e13),
    ):
        assert price.gpu_rate(name, dtype) == pytest.approx(rate, rel=0.05)
