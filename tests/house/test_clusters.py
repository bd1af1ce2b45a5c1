"""The templates for other engines parse, and name what their clients know."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import huggingface_hub
import pytest
import yaml

from tests.house.commands import commands
from tests.house.source import ROOT

FOLDER = ROOT / "docs" / "clusters"


def template(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def test_kubernetes_numbers_the_parts_and_never_repeats_a_refusal() -> None:
    job = template("kubernetes.yaml")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["completionMode"] == "Indexed"
    assert container["command"] == ["qaudit", "part", "/out", "--part", str(spec["completions"])]
    assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [2, 78]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy needs it


def test_jobs_of_the_hub_call_the_client_with_what_it_takes() -> None:
    tree = ast.parse((FOLDER / "hub_jobs.py").read_text(encoding="utf-8"))
    calls = {n.func.id: n for n in ast.walk(tree)
             if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}  # fmt: skip
    known = inspect.signature(huggingface_hub.run_job).parameters
    assert {one.arg for one in calls["run_job"].keywords} <= known.keys()
    volume = {one.arg: "/out" for one in calls["Volume"].keywords if one.arg != "type"}
    assert huggingface_hub.Volume(type="bucket", **volume).mount_path == "/out"


@pytest.mark.parametrize("name", ["skypilot.yaml", "github-matrix.yml"])
def test_a_template_runs_a_part_with_options_that_exist(name: str) -> None:
    template(name)
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert "qaudit part" in text
    (part,) = [command for path, command in commands() if list(path) == ["part"]]
    assert "--part" in [option for one in part.params for option in one.opts]


def test_every_template_is_tested() -> None:
    tested = {"kubernetes.yaml", "hub_jobs.py", "skypilot.yaml", "github-matrix.yml"}
    assert {path.name for path in FOLDER.iterdir()} == tested
