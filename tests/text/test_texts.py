"""The text of a plan: fetched before any weights, read no further than is asked, recorded."""

import gzip
import re
import shutil
import zlib
from dataclasses import replace

import pytest

from qaudit.errors import CorpusError, HubError, QauditError, SourceError, UnreachableError
from qaudit.planning.prepare import make_plan
from qaudit.text.corpus import build_corpus
from qaudit.text.documents import read_documents
from qaudit.text.texts import (
    DEFAULT_HUB_CALIBRATION,
    DEFAULT_HUB_EVALUATION,
    find_texts,
    read_corpus,
    with_default_texts,
)
from qaudit.types import Protocol, Recipe, digest
from tests.support import tiny
from tests.support.hub import Hub
from tests.support.running import run
from tests.support.series import opened
from tests.support.texts import BYTES, lines

WORDS = ["the cat sat on the mat", "a dog and a cat", "one two three four", "the mat sat on a dog"]


def recipe(*targets, **asked):
    few = {"calibration_documents": 2, "evaluation_documents": 2, "context": 8}
    few |= {"device": "cpu", "dtype": "float32", **asked}
    return Recipe(targets, ("rtn-4bit:group=32",), **few)


def test_models_of_the_hub_alone_are_measured_on_published_text():
    for given, calibration, evaluation in (
        ({}, DEFAULT_HUB_CALIBRATION, DEFAULT_HUB_EVALUATION),
        ({"calibration": "mine.txt"}, "mine.txt", DEFAULT_HUB_EVALUATION),
        ({"evaluation": "mine.txt"}, DEFAULT_HUB_CALIBRATION, "mine.txt"),
    ):
        found = with_default_texts(recipe("org/name", **given), on_hub=True)
        wanted = (calibration, evaluation, None)
        assert (found.calibration, found.evaluation, found.choices) == wanted
        local = recipe("folder", **given)
        assert with_default_texts(local, on_hub=False) == local


class Counted:
    """A tokenizer that counts the texts it is given."""

    is_fast, bos_token_id, eos_token_id, count = True, None, None, 0

    def __call__(self, text, **options):
        self.count += 1
        return BYTES(text, **options)


def damaged_after(path, count):
    """Write a zipped text that ends in bytes nobody can unzip, far behind `count` documents."""
    texts = (f"document {k} of {path.name} {digest(str(k))}" for k in range(count))
    more = (f"more {k} {digest(str(k))}" for k in range(4_000))
    packer = zlib.compressobj(wbits=31)
    whole = packer.compress(lines(*texts, *more)) + packer.flush(zlib.Z_FULL_FLUSH)
    path.write_bytes(whole + b"\xff" * 4096)
    return str(path)


@pytest.mark.parametrize("seed", [0, 1])
def test_other_documents_are_neither_unzipped_nor_tokenized(tmp_path, seed):
    count = 128 if seed == 0 else 8  # another seed draws from 16 times as many
    pool = damaged_after(tmp_path / "calibration.json.gz", 128)
    scored = damaged_after(tmp_path / "evaluation.json.gz", 128)
    tokenizer = Counted()
    protocol = Protocol(
        64, bos="never", calibration_seed=seed,
        calibration_documents=count, evaluation_documents=count,
    )  # fmt: skip
    corpus = build_corpus(read_documents(pool), read_documents(scored), tokenizer, protocol)
    assert len(corpus.documents) == count
    assert len({window.document for window in corpus.calibration}) == count
    assert tokenizer.count == (2 + seed) * count  # the draws before it are dealt first
    with pytest.raises(CorpusError, match="damaged"):
        list(read_documents(pool))


# --------------------------------------------------------------------------------------- the Hub


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    model = tiny.make(root / "acme" / "tiny" / "v1", "llama", vocab_size=320)
    BYTES.save_pretrained(model)
    data = root / "datasets" / "acme" / "text" / "v1"
    data.mkdir(parents=True)
    (data / "fed.jsonl").write_bytes(lines(*WORDS[:2]))
    (data / "scored.json.gz").write_bytes(gzip.compress(lines(*WORDS[2:]), mtime=0))
    bare = tiny.make(
        root / "HuggingFaceTB/SmolLM3-3B-checkpoints/stage1-step-40000", "llama", vocab_size=320
    )
    shutil.copytree(model, root / "HuggingFaceTB/SmolLM3-3B/v1")
    shutil.copytree(bare, root / "acme/bare/v1")
    gated = root / "datasets" / "acme" / "gated"
    shutil.copytree(data, gated / "v1")
    (gated / "repo.json").write_text('{"gated": "manual"}')
    with Hub(root).running() as hub:
        yield hub


@pytest.fixture
def hub(served, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("QAUDIT_CACHE", str(tmp_path / "known"))
    served.log.clear()
    served.faults.clear()
    return served


FED, SCORED = "hf://datasets/acme/text/fed.jsonl", "hf://datasets/acme/text/scored.json.gz"


def test_a_plan_says_where_text_comes_from_and_an_audit_its_bytes(hub, tmp_path):
    asked = opened(hub)
    plan = make_plan(recipe("acme/tiny", calibration=FED, evaluation=SCORED), hub=asked)
    fed, scored = plan.texts
    assert (fed.source, scored.source) == (FED, SCORED)
    audit = run(plan, tmp_path / "out", hub=asked)
    assert audit.protocol["sources"] == {
        "calibration": f"hf://datasets/acme/text@{fed.commit}/fed.jsonl",
        "calibration_sha256": fed.sha256,
        "evaluation": f"hf://datasets/acme/text@{scored.commit}/scored.json.gz",
        "evaluation_sha256": scored.sha256,
    }
    corpus = read_corpus(plan)
    assert [d.name for d in corpus.documents] == ["scored.json.gz:1", "scored.json.gz:2"]


def test_a_text_is_looked_up_once_for_two_roles_or_not_read(hub, tmp_path):
    asked = opened(hub)
    plan = make_plan(recipe("acme/tiny", calibration=FED, evaluation=FED), hub=asked)
    assert len(plan.texts) == 1
    with pytest.raises(CorpusError, match="calibration and evaluation share 2 documents"):
        run(plan, tmp_path / "out", hub=asked)
    plan = replace(planned(hub), texts=())
    with pytest.raises(SourceError, match="was not looked up"):
        run(plan, tmp_path / "out", hub=opened(hub))
    hub.log.clear()
    assert find_texts(opened(hub).listing, recipe("acme/tiny", calibration="mine.txt")) == ()
    assert hub.log == []


@pytest.mark.parametrize("role", ["calibration", "evaluation", "choices"])
def test_a_text_that_cannot_be_found_ends_the_scan_with_the_plan(hub, role):
    what = "multiple-choice items" if role == "choices" else f"{role} text"
    for source, said in (
        ("hf://datasets/acme/none/a.jsonl", "dataset `acme/none` does not exist, or is private"),
        ("hf://datasets/acme/text/feed.jsonl", "there is no `feed.jsonl`"),
        ("hf://datasets/acme/text@v7/fed.jsonl", "has no revision `v7`"),
    ):
        texts = {"calibration": FED, "evaluation": SCORED, role: source}
        with pytest.raises(HubError) as caught:
            make_plan(recipe("acme/tiny", **texts), hub=opened(hub))
        assert caught.value.code == 4
        assert caught.value.message.startswith(f"the {what} `{source}` cannot be had: ")
        assert said in caught.value.message
        assert caught.value.hint.endswith(f"or give another text with `--{role}`")
    assert weights_asked_for(hub) == []


def weights_asked_for(hub):
    return [e["path"] for e in hub.log if e["path"].endswith("model.safetensors")]


def refused_run(hub, tmp_path, plan, **client):
    with pytest.raises(QauditError) as caught:
        run(plan, tmp_path / "out", hub=opened(hub, **client))
    assert weights_asked_for(hub) == []
    assert not list((tmp_path / "cache").rglob("model.safetensors"))
    return caught.value


def planned(hub, **asked):
    plan = make_plan(
        recipe("acme/tiny", **{"calibration": FED, "evaluation": SCORED, **asked}), hub=opened(hub)
    )
    hub.log.clear()
    return plan


GATED = "hf://datasets/acme/gated/scored.json.gz"
FLIPPED = {"match": r"GET .*scored\.json\.gz", "flip": 11, "times": 10**9}
SILENT = {"match": r"GET .*fed\.jsonl", "status": 503}


def test_a_text_that_does_not_come_ends_the_scan_before_weights(hub, tmp_path):
    for evaluation, faults, kind, wrong in (
        (GATED, [], HubError, f"the evaluation text `{GATED}` cannot be had: .*gated"),
        (SCORED, [FLIPPED], HubError, f"the evaluation text `{SCORED}` cannot be had: "),
        (SCORED, [SILENT], UnreachableError, f"the calibration text `{FED}` cannot be had"),
        (SCORED, None, HubError, "HF_HUB_OFFLINE"),
    ):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        hub.faults.clear()
        plan = planned(hub, evaluation=evaluation)
        hub.faults += faults or []
        error = refused_run(hub, tmp_path, plan, offline=faults is None)
        assert type(error) is kind
        assert re.search(wrong, error.message)
        assert bool(hub.log) == (faults is not None)
        if evaluation == GATED:
            assert "/datasets/acme/gated" in error.hint
            assert error.hint.endswith("or give another text with `--evaluation`")


def test_a_series_without_a_tokenizer_takes_that_of_its_family(hub, tmp_path):
    asked = opened(hub)
    target = "HuggingFaceTB/SmolLM3-3B-checkpoints@stage1-step-40000"
    plan = make_plan(recipe(target, calibration=FED, evaluation=SCORED), hub=asked)
    audit = run(plan, tmp_path / "out", hub=asked)
    commit = asked.listing.commit("HuggingFaceTB/SmolLM3-3B")
    assert audit.protocol["sources"]["tokenizer"] == f"HuggingFaceTB/SmolLM3-3B@{commit}"
    taken = [e["path"] for e in hub.log if "/SmolLM3-3B/" in e["path"]]
    assert any("tokenizer.json" in path for path in taken)
    assert not any("model.safetensors" in path for path in taken)
    # One of no family without a tokenizer is refused.
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(tmp_path / "out")
    asked = opened(hub)
    plan = make_plan(recipe("acme/bare", calibration=FED, evaluation=SCORED), hub=asked)
    hub.log.clear()
    error = refused_run(hub, tmp_path, plan)
    assert "there is no tokenizer in" in error.message
