"""The action and the workflows that the pages show: pinned, and no input is text of a script.

The scripts are taken out of `action.yml` and run by the shell that runners use, on a real audit,
with inputs that would like to be words or commands.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer.main
import yaml

from qaudit.cli.app import app
from tests.house.source import ROOT
from tests.support.saved_audits import save

ACTION = ROOT / "action.yml"
EXAMPLES = sorted((ROOT / "docs" / "ci").glob("*.yml"))
WORKFLOWS = [path for path in EXAMPLES if path.stem != "gitlab"]
OWN = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"\S+@[0-9a-f]{40} +# v\d[\d.]*")
OURS = re.compile(r"qaudit/qaudit@0{40} +# v\d[\d.]*")


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps():
    return read(ACTION)["runs"]["steps"]


def scripts(path):
    """Return what a file gives to a shell."""
    document = read(path)
    jobs = document.get("jobs", {"action": document.get("runs", {})})
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


# ------------------------------------------------------------------------------- as text


def test_every_action_is_pinned_by_commit_as_our_own_workflows_pin_it():
    own = "\n".join(path.read_text("utf-8") for path in OWN)
    pins = dict(re.findall(r"uses: *(actions/[\w-]+)@(\w+)", own))
    for path in (ACTION, *WORKFLOWS, *OWN):
        text = path.read_text(encoding="utf-8")
        used = re.findall(r"uses: *(.*)", text)
        assert used, path
        assert [use for use in used if not PINNED.fullmatch(use)] == []
        assert all(OURS.fullmatch(use) for use in used if use.startswith("qaudit/"))
        for name, commit in re.findall(r"uses: *(actions/[\w-]+)@(\w+)", text):
            assert path in OWN or (name, commit) == (name, pins[name])


def test_no_expression_stands_in_a_script_and_a_workflow_starts_without_rights():
    for path in (ACTION, *WORKFLOWS):
        assert [text for text in scripts(path) if "${{" in text] == []
    for path in (*WORKFLOWS, *OWN):
        document = read(path)
        assert document["permissions"] == {}, path
        for job in document["jobs"].values():
            assert "permissions" in job and "timeout-minutes" in job, path


def test_every_input_is_used_and_every_one_that_is_used_is_declared():
    used = set(re.findall(r"inputs\.([\w-]+)", ACTION.read_text(encoding="utf-8")))
    assert used == set(read(ACTION)["inputs"])
    for path in WORKFLOWS:
        for job in read(path)["jobs"].values():
            for step in job["steps"]:
                if step.get("uses", "").startswith("qaudit/"):
                    assert set(step["with"]) <= used
    (upload,) = [step for step in steps() if "upload-sarif" in step.get("uses", "")]
    # A run without an answer is not uploaded.
    assert """contains(fromJSON('["0", "1", "3"]'), steps.gate.outputs.exit-code)""" in upload["if"]


def test_the_command_in_the_gitlab_file_is_understood():
    (job,) = read(ROOT / "docs" / "ci" / "gitlab.yml").values()
    _, command = job["script"]
    gate = typer.main.get_command(app).commands["gate"]  # type: ignore[attr-defined]
    gate.make_context("gate", shlex.split(command)[2:])
    assert job["artifacts"]["reports"]["junit"] == "junit.xml"


# ------------------------------------------------------------------------------- as programs

HARSH = """\
rules:
  - {name: nothing, metric: relative_error, schemes: ["*"], subjects: ["@all"], margin: 0.01%}
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "audit"
    save(folder, documents=64)
    return folder


@pytest.fixture
def gate(saved, tmp_path):
    """Return a function that runs the gate's script with inputs, as a runner does."""
    tools = tmp_path / "tools" / "bin"
    tools.mkdir(parents=True)
    for name, command in (("python", ""), ("qaudit", "-m qaudit ")):
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {command}"$@"\n')
        (tools / name).chmod(0o755)
    place = tmp_path / "repository"
    shutil.copytree(saved, place / "audit")
    (step,) = [step for step in steps() if step.get("id") == "gate"]

    def run(**inputs):
        files = {name: tmp_path / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for file in files.values():
            file.write_text("")
        defaults = {n: str(d.get("default", "")) for n, d in read(ACTION)["inputs"].items()}
        defaults |= {"audit": "audit", **inputs}
        given = {
            name: defaults[match[1]]
            for name, value in step["env"].items()
            if (match := re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", value))
        }
        assert set(step["env"]) == {*given, "PLACE"}
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QAUDIT_")}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=place,
            env={
                **environment,
                **given,
                **{name: str(file) for name, file in files.items()},
                "PLACE": str(tools.parent),
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        outputs = dict(
            line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines()
        )
        last = steps()[-1]
        assert last["env"] == {"CODE": "${{ steps.gate.outputs.exit-code }}"}
        code = {**os.environ, "CODE": outputs["exit-code"]}
        after = subprocess.run(["bash", "-e", "-c", last["run"]], env=code, check=False)
        return SimpleNamespace(
            code=done.returncode, out=done.stdout, err=done.stderr, outputs=outputs,
            summary=files["GITHUB_STEP_SUMMARY"].read_text(), action=after.returncode,
        )  # fmt: skip

    return run


def test_an_audit_is_gated_and_every_report_is_written(gate, tmp_path):
    ran = gate(policy="explore", formats="md, json,junit\nsarif badge shields")
    assert (ran.code, ran.err.count("error")) == (0, 0)
    assert ran.outputs == {"verdict": "pass", "exit-code": "0"}
    assert ran.action == 0
    assert ran.out.startswith("::")
    assert ran.summary.startswith("## qaudit gate\n\n**WARNINGS ONLY by the policy `explore`: ")
    reports = {path.name for path in (tmp_path / "repository" / "qaudit-gate").iterdir()}
    names = "gate.md gate.json junit.xml gate.sarif badge.svg shields.json"
    assert reports == set(names.split())
    (tmp_path / "repository" / "harsh.yaml").write_text(HARSH, encoding="utf-8")
    ran = gate(policy="harsh.yaml")  # what breaches fails the action once reports are written
    assert (ran.code, ran.action) == (0, 1)
    assert ran.outputs == {"verdict": "fail", "exit-code": "1"}
    assert "::error file=harsh.yaml,line=" in ran.out


def test_names_that_would_be_commands_stay_names(gate, saved, tmp_path):
    place = tmp_path / "repository"
    audit, policy = (
        """it's "our" $(touch owned) `touch owned`; touch owned""",
        "a b'$(touch owned).yaml",
    )
    shutil.copytree(saved, place / audit)
    presets = ROOT / "qaudit" / "policy" / "presets"
    shutil.copy(presets / "explore.yaml", place / policy)
    inputs = {"audit": audit, "policy": policy, "reports": "re ports/$(touch owned)"}
    ran = gate(**inputs, **{"upload-sarif": "true", "baseline": audit})
    assert ran.outputs["exit-code"] in ("0", "1", "3"), ran.err
    assert ran.code == 0
    assert list(place.rglob("owned")) == []
    found = json.loads((place / inputs["reports"] / "gate.json").read_text())
    assert (found["policy"]["path"], found["baseline"]) == (policy, audit)
    assert (place / inputs["reports"] / "gate.sarif").is_file()


def test_a_tool_that_fails_gives_no_answer(gate):
    for inputs in ({"audit": "./nothing"}, {"audit": "--help"}):
        ran = gate(**inputs)
        assert (ran.code, ran.action) == (0, 2)
        assert ran.outputs == {"verdict": "error", "exit-code": "2"}
        assert "error" in ran.err


BLOCK = """
import json, sys
from importlib.metadata import packages_distributions
light = set(json.loads(sys.argv.pop(1)))
owners = packages_distributions()

class Blocked:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        names = {owner.lower().replace("_", "-") for owner in owners.get(top, ())}
        if names and not names & light:
            raise ImportError(f"`{name}` is not in judge.lock")

sys.meta_path.insert(0, Blocked())
from qaudit.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [["gate", "AUDIT", "--policy", "explore"], ["diff", "AUDIT", "AUDIT"], ["report", "AUDIT"]],
    ids=lambda command: command[0],
)
def test_judging_needs_no_more_than_its_lock(saved, command):
    lines = (ROOT / "requirements" / "judge.lock").read_text(encoding="utf-8").splitlines()
    light = [line.partition("==")[0] for line in lines if "==" in line]
    assert "torch" not in light
    words = [str(saved) if word == "AUDIT" else word for word in command]
    done = subprocess.run(
        [sys.executable, "-c", BLOCK, json.dumps([*light, "qaudit"]), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_what_judging_needs_is_locked_as_everything_is():
    locks = [(ROOT / f"requirements/{name}.lock").read_text("utf-8") for name in ("judge", "run")]
    judge, run = (
        {line.partition(" ")[0] for line in lock.splitlines() if "==" in line} for lock in locks
    )
    assert judge <= run
    assert all("--hash=sha256:" in entry for entry in locks[0].split("\n# ")[0].split("==")[2:])
    assert not any(line.startswith(("torch", "transformers")) for line in judge)
