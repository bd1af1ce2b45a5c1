"""Parts of plans on the Hub: fetched on a login node, measured without a network, one audit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import TEXT, Run, audit_of, refused, settings, weights_in
from tests.support.hub import Hub
from tests.support.parts import MAIN, WITHOUT_TORCH, same_audit, start
from tests.support.quantized import quantized_copy

REPO, SHIPPED = "lab/series", "lab/series-GPTQ"
ASKED = (
    REPO,
    *TEXT,
    "--schemes",
    "rtn-3bit:group=16",
    "--soup",
    "step10+step200",
    "--set",
    "context=32",
)


@pytest.fixture
def hub(place: Path, online: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    root = online / "root"
    quantized_copy(place / "series/step10", root / SHIPPED / "v1", "gptq")
    shutil.move(place / "series", root / REPO)
    for repo in (REPO, SHIPPED):
        settings(root / repo, branch_per_revision=True, main=None)
    with Hub(root).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def parts(qaudit: Run, out: Path, count: int) -> set[int]:
    return {qaudit("part", out, "--part", f"{k}/{count}").code for k in range(count)}


@pytest.mark.slow
def test_parts_run_without_a_network_once_a_login_node_has_fetched(
    hub: Hub, place: Path, qaudit: Run, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert qaudit("plan", *ASKED, "--out", "out").code == 0
    assert weights_in(online / "hf") == []
    process = start(place, "fetch", "out", main=WITHOUT_TORCH + MAIN)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert "3 of 3 checkpoints and 0 texts are in the cache" in err
    hub.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert parts(qaudit, place / "out", 2) == {0}
    assert qaudit("collect", "out").code == 0
    assert hub.log == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert qaudit("scan", *ASKED, "--out", "whole").code == 0
    same_audit(place / "whole", place / "out")


def test_what_was_not_fetched_is_named_and_the_next_run_fixes_it(
    hub: Hub, place: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert qaudit("plan", *ASKED, "--out", "out").code == 0
    hub.faults.append({"match": r"HEAD|GET .*resolve/.*\.safetensors", "status": 404, "times": 2})
    done = qaudit("fetch", "out")
    assert done.code == 3
    assert "1 of 3 checkpoints and 0 texts are in the cache" in done.err
    assert done.err.count("not downloaded step") == 2
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert 3 in parts(qaudit, place / "out", 1)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.faults.clear()
    assert qaudit("fetch", "out").code == 0
    assert parts(qaudit, place / "out", 1) == {0}
    assert qaudit("collect", "out").code == 0


@pytest.mark.slow
def test_caches_of_nodes_fetch_what_each_part_needs_and_the_checkpoint_before(
    hub: Hub, place: Path, qaudit: Run, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (*ASKED, "--set", "diagnostics=weights", "--set", "repeats=1")
    assert qaudit("plan", *asked, "--out", "out").code == 0
    fetched = []
    for number in range(3):
        monkeypatch.setenv("HF_HOME", str(online / f"node{number}"))
        assert qaudit("part", "out", "--part", f"{number}/3").code == 0
        fetched.append(len({path.resolve() for path in weights_in(online / f"node{number}")}))
    assert qaudit("collect", "out").code == 0
    monkeypatch.setenv("HF_HOME", str(online / "hf"))
    assert qaudit("scan", *asked, "--out", "whole").code == 0
    first, second = (audit_of(place / name)["diagnostics"]["weights"] for name in ("out", "whole"))
    assert first == second
    assert any(row["previous"] for row in first)
    same_audit(place / "whole", place / "out")
    assert sum(fetched) >= 4  # two of three parts begin behind another one's checkpoint


@pytest.mark.slow
def test_a_part_with_a_disk_budget_evicts_what_it_fetched_itself(
    hub: Hub, place: Path, qaudit: Run, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert qaudit("plan", *ASKED, "--out", "out").code == 0
    budget = ("--set", "disk_budget=1MB")
    (place / "mounts").write_text("scratch:/ / lustre rw 0 0\n")
    with monkeypatch.context() as shared:
        shared.setattr("qaudit.host.MOUNTS", place / "mounts")
        done = qaudit("part", "out", "--part", "0/2", *budget)
        refused(done, 4, "network file system (lustre)", "a folder on a disk of this host")
    for number in range(2):
        assert qaudit("part", "out", "--part", f"{number}/2", *budget).code == 0
        assert weights_in(online / "hf") == []
    assert not (place / "out" / "fetched.json").exists()
    assert qaudit("collect", "out").code == 0


@pytest.mark.slow
def test_files_that_ship_are_measured_in_parts(
    hub: Hub, place: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (REPO, "--checkpoints", "step10", *TEXT, "--schemes", "rtn-4bit", "--set", "context=32")
    asked = (*asked, "--shipped", f"{SHIPPED}@v1")
    assert qaudit("plan", *asked, "--out", "out").code == 0
    done = qaudit("fetch", "out")
    assert (done.code, "2 of 2 checkpoints and 0 texts are in the cache" in done.err) == (
        0,
        True,
    ), done.err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert parts(qaudit, place / "out", 2) == {0}
    assert qaudit("collect", "out").code == 0
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert qaudit("scan", *asked, "--out", "whole").code == 0
    same_audit(place / "whole", place / "out")
    assert [row["scheme"] for row in audit_of(place / "out")["measurements"]][-1] == "series-GPTQ"


def test_the_network_is_needed_only_where_something_is_missing(
    hub: Hub, place: Path, qaudit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert qaudit("plan", *ASKED, "--out", "out").code == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = qaudit("part", "out", "--part", "0/1")
    assert done.code == 3
    assert qaudit("status", "out").out.startswith("round 1: 0 of 4 subjects measured, 4 failed")
    done = qaudit("collect", "out")
    assert done.code == 4
    assert "HF_HUB_OFFLINE" in done.err


def test_a_configuration_edited_in_the_cache_is_never_measured(
    hub: Hub, place: Path, qaudit: Run, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert qaudit("plan", *ASKED, "--out", "out").code == 0
    assert qaudit("fetch", "out").code == 0
    config = next((online / "hf").rglob("config.json")).resolve()  # equal ones are one blob
    text = config.read_text()
    config.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 5e-01'))
    assert config.read_text() != text
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert qaudit("part", "out", "--part", "0/1").code == 4
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert qaudit("part", "out", "--part", "0/1").code == 0
    assert config.read_text() == text  # fetched again
