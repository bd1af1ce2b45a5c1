"""`--soup greedy:...`: what is searched for, what it leaves behind, and going on."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import qaudit.engine.measure
from qaudit.saved.audits import from_json
from qaudit.saved.evidence import read_saved
from qaudit.saved.results import read_measurement
from qaudit.text.rollouts import Rollout
from qaudit.text.tokenizer import tokenizer_sha256
from tests.support import rollouts
from tests.support.cards import whole_at
from tests.support.cli import OUT, audit_of, cells, refused
from tests.support.models import text
from tests.support.saved_audits import violations

pytestmark = pytest.mark.usefixtures("trained")
GREEDY = ("--soup", "best=greedy(series-*)")


@pytest.fixture
def passes(monkeypatch):
    """Return the members of all that is measured from now on, and what is read beside documents."""
    done = []
    real = qaudit.engine.measure.send

    def counted(task, *rest):
        members = "+".join(c.label.removeprefix("series-") for c, _ in task.subject.members)
        more = f", {len(task.corpus.items)} items" if task.corpus.items else ""
        more += ", rollouts" if task.corpus.rollouts is not None else ""
        done.append(members + more + ("" if task.pass_.full_precision else " alone"))
        return real(task, *rest)

    monkeypatch.setattr(qaudit.engine.measure, "send", counted)
    return done


@pytest.fixture(scope="module")
def learned(shipped, tmp_path_factory):
    """Return a checkpoint that has learned the words it is scored on, and three around it.

    `a` and `b` are on opposite sides of it, so that their mean is it; `c` is far from it.
    """
    root = tmp_path_factory.mktemp("learned")
    shutil.copytree(shipped / "series" / "step10", root / "step10")
    _learn(root / "step10")
    for seed, (name, share) in enumerate((("a", 0.8), ("b", -0.8), ("c", 3.0))):
        folder = root / "ends" / f"series-{name}"
        shutil.copytree(root / "step10", folder)
        _push(folder / "model.safetensors", share, seed // 2)
    return root


@pytest.fixture
def trained(learned, place):
    shutil.copytree(learned / "ends", place / "ends")
    shutil.copytree(learned / "step10", place / "series" / "step10", dirs_exist_ok=True)
    return place


def _push(path, share, seed):
    """Move weights in a random direction, by a share of their own size."""
    torch.manual_seed(seed)
    tensors = load_file(path)
    pushed = {n: t + share * t.std() * torch.randn_like(t) for n, t in tensors.items()}
    save_file(pushed, path, metadata={"format": "pt"})


def _learn(folder):
    """Train a checkpoint on a few known words, which takes a second."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        ids = tokenizer(text(1000 + step, 40), return_tensors="pt").input_ids[:, :48]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def _search():
    (row,) = audit_of()["diagnostics"]["greedy"]
    return row


def test_an_interrupted_search_goes_on_and_is_never_done_again(scan, passes, monkeypatch):
    counted = qaudit.engine.measure.send

    def stopped(task, *rest):
        if len(passes) == 4:
            raise KeyboardInterrupt
        return counted(task, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(qaudit.engine.measure, "send", stopped)
        assert scan("ends", *GREEDY).code == 130
    assert len(passes) == 4
    done = scan("ends", *GREEDY, code=0)
    among = "search best among series-a, series-b and series-c: up to 2 means"
    assert among in " ".join(done.err.split())
    chose = "The search for best chose on the 12 documents that judge it: its 2 means count."
    assert chose in " ".join(done.out.split())
    audit, row = audit_of(), _search()
    assert (row["scheme"], row["documents"], row["further"]) == ("rtn-4bit", 12, False)
    assert row["members"] == ["series-a", "series-b"]
    assert (row["trials"][-1]["added"][-1], row["trials"][-1]["taken"]) == ("c", False)
    best = next(s for s in audit["subjects"] if s["label"] == "best")
    assert (best["merge"], [m["label"] for m in best["members"]]) == ("mean", row["members"])
    names = {"series-a", "series-b", "series-c", "best"}
    assert {m["subject"] for m in audit["measurements"]} == names
    assert (passes, violations(audit)) == (["a", "b", "c", "a+b alone", "a+b+c alone", "a+b"], [])
    (search,) = from_json((OUT / "audit.json").read_text()).diagnostics.greedy
    assert search.label == "best" and search.trials

    passes.clear()
    scan("ends", *GREEDY, code=0)
    assert (passes, _search()) == ([], row)
    more = ("--schemes", "rtn-3bit", "--soup", "best=greedy:scheme=rtn-4bit(series-*)")
    assert scan("ends", *more).code == 0  # is no search again
    assert passes == ["a alone", "b alone", "c alone", "a+b alone"]


def test_a_search_chooses_on_further_documents_that_no_verdict_reads(scan, passes):
    few = ("--set", "evaluation_documents=6")
    done = scan("ends", *GREEDY, *few, code=0)
    audit, row = audit_of(), _search()
    assert (row["documents"], row["further"], row["members"]) == (6, True, ["series-a", "series-b"])
    searched = [f"{members} alone" for members in ("a", "b", "c", "a+b", "a+b+c")]
    assert passes == ["a", "b", "c", *searched, "a+b"]
    # The soup is a subject like any other: on documents that it was not chosen on.
    assert {m["documents"] for m in audit["measurements"]} == {6}
    assert cells()["best", "rtn-4bit"]["ce"] != row["loss"]
    files = (OUT / "evidence").glob("*.npz")
    read = {read_measurement(file).evidence.document_sha256 for file in files}
    judged = {m.evidence.document_sha256 for m in read_saved(OUT).measurements}
    (chosen_on,), (judged_on,) = read - judged, judged
    assert not set(chosen_on) & set(judged_on)
    (one,) = audit["verdict"]["classes"]
    assert one["at_once"] == 4  # on fewer than 10 documents all candidates, and no trial
    assert "chose on the" not in done.out
    assert "on 6 further documents took 2 of 3" in whole_at(OUT)
    assert scan("ends", *GREEDY, *few).code == 0
    assert len(passes) == 9


def test_trials_read_no_rollouts_and_no_items(scan, trained, passes):
    """They choose by the loss of documents; subjects and the soup are measured on everything."""
    folder = trained / "ends" / "series-c"
    rollout = Rollout(prompt=0, prompt_sha256="a", ids=(1, 2), new_ids=(3, 4, 5))
    rollouts.written(trained / "rolls", (rollout,), tokenizer_sha256=tokenizer_sha256([folder]))
    item = {"question": "which", "choices": ["fox", "dog", "night"], "answer": 0}
    (trained / "items.jsonl").write_text(7 * f"{json.dumps(item)}\n", "utf-8")
    more = ("--set", "rollouts=rolls", "--set", "choices=items.jsonl")
    asked = ("ends", *GREEDY, "--checkpoints", "series-c", *more)
    scan(*asked, code=0)
    trials = ["a alone", "b alone", "a+b alone", "a+b+c alone"]
    assert passes == ["c, 7 items, rollouts", *trials, "a+b, 7 items, rollouts"]
    audit = audit_of()
    assert {(r["subject"], r["scheme"]) for r in audit["diagnostics"]["rollouts"]} == {
        (subject, scheme) for subject in ("series-c", "best") for scheme in ("fp", "rtn-4bit")
    }
    assert [s["label"] for s in audit["subjects"]] == ["series-c", "best"]
    passes.clear()
    assert scan(*asked).code == 0
    assert passes == []


def test_the_same_soup_is_the_same_measurement(scan, passes):
    scan("ends", *GREEDY, "--soup", "both=mean(series-a+series-b)", code=0)
    # The soup is measured before the search, which finds it.
    assert passes == ["a", "b", "c", "a+b", "a+b+c alone"]
    audit = audit_of()
    ce = {m["subject"]: m["ce"] for m in audit["measurements"] if m["scheme"] == "rtn-4bit"}
    assert ce["best"] == ce["both"]
    # Candidates that nobody asked for are no subjects.
    passes.clear()
    few = ("--checkpoints", "series-c", "--set", "evaluation_documents=6")
    scan("ends", *GREEDY, *few, "--out", "few", code=0)
    labels = [subject["label"] for subject in audit_of(Path("few"))["subjects"]]
    assert labels == ["series-c", "best"]
    # On further documents the one that is a subject is measured by itself too.
    alone = [f"{members} alone" for members in ("a", "b", "a+b", "a+b+c")]
    assert [name for name in passes if name != "c alone"] == ["c", *alone, "a+b"]
    assert "c alone" in passes


def test_a_search_that_stays_at_one_member_says_so(scan):
    scan("ends", "--soup", "best=greedy(series-a+series-c)", code=0)
    audit = audit_of()
    assert "best" not in {s["label"] for s in audit["subjects"]}
    (finding,) = [f for f in audit["findings"] if f["rule"] == "QA017"]
    message = "no member improves on `series-a` at rtn-4bit, so that `best` is no soup"
    found = (finding["message"], finding["level"], finding["outcome"])
    assert found == (message, "info", "pass")
    assert message in whole_at(OUT)
    assert _search()["members"] == ["series-a"]


def test_a_recipe_may_ask_for_a_search(qaudit, trained, scan):
    text = {name: f"{name}.jsonl" for name in ("calibration", "evaluation")}
    recipe = {"targets": "ends", "schemes": "rtn-4bit", **text}
    twice = {"label": "best", "merge": "greedy:scheme=rtn-4bit", "of": ["series-*", "series-?"]}
    (trained / "mine.yaml").write_text(json.dumps({**recipe, "soups": [twice]}))
    refused(qaudit("scan", "mine.yaml"), 2, "has the same weights twice", "leave one")
    recipe["soups"] = ["best=greedy(series-a+series-b)"]
    (trained / "mine.yaml").write_text(json.dumps(recipe))
    assert qaudit("scan", "mine.yaml", "--out", "out").code == 0
    assert _search()["members"] == ["series-a", "series-b"]
    # A candidate that cannot be read ends the search and nothing else.
    weights = trained / "ends" / "series-c" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    scan("ends", *GREEDY, "--out", "broken", code=3)
    audit = audit_of(Path("broken"))
    assert {s["subject"] for s in audit["skipped"]} == {"series-c", "best"}
    assert [s["label"] for s in audit["subjects"]] == ["series-a", "series-b"]
    assert "greedy" not in audit["diagnostics"]
