"""`qaudit series`: what it shows, what it asks of the Hub, and how it ends."""

import json
import shutil

import pytest

from qaudit.errors import UnreachableError
from qaudit.hub.listing import Listing
from tests.support import released, sample
from tests.support.cli import refused
from tests.support.hub import write_headers
from tests.support.names import names_of
from tests.support.saved_audits import save

REPO = "allenai/OLMo-2-1124-7B"


STEPS = [f"step{1000 * n}" for n in range(1, 41)]
NAMES = [*STEPS, "main"]
"""Checkpoints of a run, of which two are equal, and a README."""


@pytest.fixture
def hub(online, serve_root):
    hub = serve_root()
    write_headers(online / "one", {"w": ("BF16", (2, 2))}, 100)
    sizes = {"pretend_nbytes": 5_000_000}
    twin = {"step40000": "step7000"}
    hub.add_names("o/run", STEPS[:-1], online / "one", main=None, aliases=twin, **sizes)
    return hub


def row_of(label, text):
    """Return the words of a checkpoint's line."""
    (row,) = [line for line in text.splitlines() if line.lstrip("* ").startswith(f"{label} ")]
    return row.split()


def calls(hub):
    paths = [e["path"].partition("/api/models/o/run/")[2] for e in hub.asked("/api/")]
    kinds = [path.partition("/")[0] for path in paths]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def test_only_trees_that_are_selected_or_asked_for_are_read_and_kept(hub, qaudit):
    shown = qaudit("series", "o/run", "--checkpoints", "*").out
    assert calls(hub) == {"refs": 1}
    assert "41 selected, 0 checked" in shown
    done = qaudit("series", "o/run")
    assert (done.code, done.err, calls(hub)) == (0, "", {"refs": 2, "tree": 12})
    head = done.out.splitlines()[0]
    assert head == f"o/run: {len(NAMES)} checkpoints, 12 selected by default, 12 checked"
    assert "* step40000" in done.out
    assert "... 2 more, steps 1,000 to 2,000" not in done.out  # too short to fold
    assert "5.0 MB" in done.out
    qaudit("series", "o/run", "--set", "last=3")
    assert calls(hub) == {"refs": 3, "tree": 13}  # main and step40000 are known by now

    done = qaudit("series", "o/run", "--check", code=0)
    assert calls(hub) == {"refs": 4, "tree": 41}
    assert f"{len(NAMES)} checked" in done.out
    assert "1 the same weights: step7000, step40000" in done.out
    assert "2 it holds no weights" in done.out
    assert row_of("main", done.out)[-2:] == ["none", "2"]
    qaudit("series", "o/run", "--check")
    assert calls(hub) == {"refs": 5, "tree": 41}
    assert "the same weights: step7000" in qaudit("series", "o/run").out


def test_a_thousand_names_are_folded_into_a_page(hub, online, qaudit):
    names = [name for name in names_of(REPO) if name != "main"]
    hub.add_names(REPO, names, online / "one", main=None, pretend_nbytes=9)
    done = qaudit("series", REPO, "--set", "last=1")
    assert len(hub.asked("/api/")) == 2
    assert "965 checkpoints, 1 selected, 1 checked" in done.out
    assert len(done.out.splitlines()) < 60
    assert "... 92 more of stage1, steps 837,000 to 928,000, every 1,000" not in done.out
    assert "1 `stage1-step98000-tokens412B`, `stage1-step101000-tokens424B`" in done.out
    assert "Ingredients 1, 2 and 3 are the seeds 42, 42069 and 666." in done.out
    assert len(qaudit("series", REPO, "--set", "last=1", "--all").out.splitlines()) > 965


def stop_at(monkeypatch, number, error):
    real = Listing.files
    asked = []

    def files(self, *args):
        asked.append(1)
        if len(asked) == number:
            raise error
        return real(self, *args)

    monkeypatch.setattr(Listing, "files", files)


def test_a_stopped_walk_keeps_trees(hub, qaudit, monkeypatch):
    silent = UnreachableError("the Hub does not answer", hint="try later")
    again = "run the same command again: qaudit series"
    with monkeypatch.context() as patch:
        stop_at(patch, 5, silent)
        done = qaudit("series", "o/run", "--check")
    refused(done, 4, "does not answer", "try later")
    with monkeypatch.context() as patch:
        stop_at(patch, 7, KeyboardInterrupt())
        done = qaudit("series", "o/run", "--check")
    refused(done, 130, "interrupted", f"{again} o/run")
    assert calls(hub) == {"refs": 2, "tree": 10}
    assert qaudit("series", "o/run", "--check").code == 0
    assert calls(hub) == {"refs": 3, "tree": 41}


def test_a_tree_that_is_refused_leaves_the_others(hub, qaudit):
    commit = hub.repos["o/run"].branches["step3000"]
    hub.faults.append({"match": f"tree/{commit}", "status": 404, "times": 99})
    done = qaudit("series", "o/run", "--check", "--all", code=3)
    assert "40 checked" in done.out and "1 of the trees could not be read:" in done.err
    assert row_of("step3000", done.out)[-1] == "-"
    assert "the same weights: step7000, step40000" in done.out
    for words, code, sentence, hint in (
        ("o/nothing", 4, "`o/nothing`", ""),
        ("o/run --checkpoints @90k..80k", 2, "`@90k..80k` ends before it", "@100k..900k/50k"),
        ("o/run --checkpoints stage2@..", 2, "no stage `stage2`", "by name"),
    ):
        refused(qaudit("series", *words.split()), code, sentence, hint)


# ------------------------------------------------------------------------------- folders and JSON


def test_folders_need_no_hub_and_equal_ones_are_found(place, qaudit):
    done = qaudit("series", "demo", code=0)
    assert ("* stage2-ingredient3-step1000" in done.out, done.err) == (True, "")
    shutil.copytree(place / "series" / "step10", place / "series" / "step3000")
    assert "the same weights" not in qaudit("series", "series").out
    done = qaudit("series", "series", "--check")
    assert "1 the same weights: step10, step3000" in done.out
    assert "MB" in done.out or "kB" in done.out
    # A type that cannot be opened is shown with its reason.
    released.save(place / "runs" / "step10", "jetmoe")
    done = qaudit("series", "runs", code=0)
    assert "`step10` cannot be audited" in done.out and "would not be quantized" in done.out
    done = qaudit("series", "runs", "--json")
    assert "would not be quantized" in json.loads(done.out)["refusals"][0]


def test_json_has_every_row_and_a_recipe_its_selection(hub, online, qaudit):
    done = qaudit("series", "o/run", "--json", "--checkpoints", "@7k", "--checkpoints", "@40k")
    found = json.loads(done.out)
    rows = {row["label"]: row for row in found["checkpoints"]}
    assert (list(rows), found["selected_by_default"]) == (NAMES, False)
    meant = {"nbytes": 5_000_000, "selected": True, "same_as": ["step40000"],
             "commit": hub.repos["o/run"].branches["step7000"]}  # fmt: skip
    assert rows["step7000"] == rows["step7000"] | meant
    assert (rows["step8000"]["nbytes"], rows["step8000"]["checked"]) == (None, False)
    assert [finding["rule"] for finding in found["findings"]] == ["QA009"]
    recipe = online / "mine.yaml"
    recipe.write_text("targets: o/run\ncheckpoints: ['@10k..20k/5k']\n", encoding="utf-8")
    lines = qaudit("series", recipe).out.splitlines()
    stars = [line.split()[1] for line in lines if line.startswith("* step")]
    assert stars == ["step10000", "step15000", "step20000"]


def test_unmeasured_checkpoints_have_predictions(qaudit, tmp_path, place):
    audit, left = (
        tmp_path / "out",
        {"stage1-step1750", "stage1-step4000", "stage2-ingredient1-step750"},
    )
    few = tuple(s for s in sample.series() if s.kind == "checkpoint" and s.label not in left)
    save(audit, subjects=few)  # of nine checkpoints of the demo's run of twelve
    done = qaudit("series", "demo", "--after", audit, "--json", code=0)
    found = json.loads(done.out)
    assert {row["label"] for row in found["prospects"]} == left
    # The loss falls fastest at the end of the decay, where the last measured neighbours are best.
    assert found["prospects"][0]["label"] == "stage2-ingredient1-step750"
    assert "--checkpoints stage2-ingredient1-step750" in done.err
    shown = qaudit("series", "demo", "--after", audit, "-q")
    assert "Error at checkpoints left out, quantized loss" in shown.out
    done = qaudit("series", place / "series", "--after", audit)
    refused(done, 2, "no checkpoint of", "an audit of the same series")
