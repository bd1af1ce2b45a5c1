"""Files that other tools read: pre-commit, Dependabot, citations, targets, templates of engines.

Templates are held to the engines' own schemas and clients.
"""

import copy
import importlib.util
import json
import re
import shlex
from unittest.mock import create_autospec

import huggingface_hub
import typer.main
import yaml
from jsonschema.validators import validator_for

from qaudit.cli.app import app
from tests.house.commands import commands
from tests.house.source import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def read(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_pre_commit_runs_the_versions_of_the_lock():
    locked = (ROOT / "requirements" / "dev.lock").read_text(encoding="utf-8").splitlines()
    (local,) = read(".pre-commit-config.yaml")["repos"]
    pins = [pin for hook in local["hooks"] for pin in hook["additional_dependencies"]]
    assert {pin.partition("==")[0] for pin in pins} == {"ruff", "codespell", "zizmor"}
    assert [pin for pin in pins if pin not in locked] == []


def test_the_hook_for_other_repositories_is_a_gate():
    (hook,) = read(".pre-commit-hooks.yaml")
    assert not hook["pass_filenames"]
    _, command, *rest = shlex.split(hook["entry"])
    gate = typer.main.get_command(app).commands[command]
    gate.make_context(command, [*rest, "audits/candidate", "--policy", "ci/policy.yaml"])
    assert re.search(hook["files"], "audits/candidate/audit.json")
    assert not re.search(hook["files"], "README.md")


def test_dependabot_updates_the_actions_and_the_citation_is_whole():
    (update,) = read(".github/dependabot.yml")["updates"]
    assert update["package-ecosystem"] == "github-actions"
    assert all((ROOT / folder.strip("/")).is_dir() for folder in update["directories"])
    citation = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for paper in citation["references"]:
        (number,) = paper["identifiers"]
        assert number["value"].removeprefix("arXiv:") in readme


def test_targets_of_the_makefile_run_folders_that_exist_and_are_run_by_integration():
    folders = re.search(r"^QUICK := \$\(addprefix tests/,(.*)\)$", MAKEFILE, re.M)
    assert folders
    assert [name for name in folders[1].split() if not (ROOT / "tests" / name).is_dir()] == []
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for target in ("check", "test"):
        assert f"\nmake {target}\n" in script
        assert re.search(rf"^{target}: .*## ", MAKEFILE, re.M)


# ---------------------------------------------------------------- templates for other engines


FOLDER = ROOT / "docs" / "clusters"
TEMPLATES = sorted(path for path in FOLDER.iterdir() if path.is_file())  # Python adds a folder
SCHEMAS = ROOT / "tests" / "house" / "schemas"


def template(name):
    loaded = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    if True in loaded:  # YAML 1.1 reads `on` so; GitHub does not
        loaded["on"] = loaded.pop(True)
    return loaded


def schema(name):
    return json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))


def holds(document, of):
    return bool(validator_for(of)(of).is_valid(document))


def changed(document, path, value):
    """Return a document with one value set."""
    document = copy.deepcopy(document)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return document


def test_engines_take_their_templates_and_no_misspelled_ones():
    job, workflow = template("kubernetes.yaml"), template("github-matrix.yml")
    task, sky = template("skypilot.yaml"), schema("skypilot-0.14.1")
    kubernetes, github = schema("kubernetes-job-1.37"), schema("github-workflow")
    for document, of, path, wrong in (
        (job, kubernetes, ("spec", "completionmode"), "Indexed"),
        (job, kubernetes, ("spec", "completions"), "32"),
        (workflow, github, ("jobs", "part", "strategi"), {}),
        (task, sky["task"], ("file_mount",), {}),
        (task["resources"], sky["resources"], ("accelerator",), "H200:1"),
    ):
        assert holds(document, of)
        assert not holds(changed(document, path, wrong), of)
    spec = job["spec"]  # numbers the parts, and never repeats a refusal
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["completionMode"] == "Indexed"
    assert container["command"] == ["qaudit", "part", "/out", "--part", str(spec["completions"])]
    assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [2, 78]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy needs it
    numbers = workflow["jobs"]["part"]["strategy"]["matrix"]["part"]
    (command,) = [s["run"] for s in workflow["jobs"]["part"]["steps"] if "part" in s.get("run", "")]
    assert numbers == list(range(len(numbers)))
    assert command.endswith(f'"$PART/{len(numbers)}"')
    assert task["run"].endswith('"$PART/$PARTS"')
    assert task["envs"].keys() == {"PART", "PARTS"}


def test_jobs_of_the_hub_give_the_client_what_it_takes(monkeypatch):
    run_job = create_autospec(huggingface_hub.run_job)  # refuses arguments that it does not have
    run_job.side_effect = lambda **given: type("Job", (), {"id": given["command"][-1]})
    monkeypatch.setattr(huggingface_hub, "run_job", run_job)
    spec = importlib.util.spec_from_file_location("hub_jobs", FOLDER / "hub_jobs.py")
    hub_jobs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hub_jobs)
    assert hub_jobs.submit("lab/out", 3) == ["0/3", "1/3", "2/3"]
    (volume,) = run_job.call_args.kwargs["volumes"]
    assert (volume.type, volume.source, volume.mount_path) == ("bucket", "lab/out", "/out")


def test_a_template_runs_a_part_with_options_that_exist():
    (part,) = [command for names, command in commands() if list(names) == ["part"]]
    assert "--part" in [option for one in part.params for option in one.opts]
    for path in TEMPLATES:
        text = path.read_text(encoding="utf-8").replace(",", "").replace('"', "")
        assert "qaudit part" in text and "--part" in text, path
