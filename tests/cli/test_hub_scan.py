"""From a name on the Hub to an audit: the whole command line, over real sockets."""

import gzip
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from qaudit.hub import open_hub
from qaudit.planning.pin import read_lock
from tests.support import released
from tests.support.cards import whole_at
from tests.support.cli import (
    OUT,
    QUICK,
    ROUNDED,
    STEPS,
    TEXT,
    audit_of,
    cells,
    refused,
    settings,
    weights_in,
)  # fmt: skip
from tests.support.gguf import write_gguf
from tests.support.models import save_tokenizer, text
from tests.support.quantized import quantized_copy

REPO = "lab/series"
LABELS = [f"step{step}" for step in STEPS]


@pytest.fixture
def hub(place, online, serve_root):
    """Serve the tiny series of `place` as branches of one repository, and files of its first."""
    root, base = online / "root", place / "series/step10"
    quantized_copy(base, root / "lab/series-GPTQ" / "v1", "gptq")
    (root / "lab/series-GGUF" / "v1" / "files").mkdir(parents=True)
    for kind in ("Q4_0", "Q8_0"):
        path = root / "lab/series-GGUF" / "v1" / "files" / f"series-{kind}.gguf"
        write_gguf(base, path, lambda n, kind=kind: kind)
    shutil.copytree(place / "series", root / REPO)
    shutil.copytree(base, root / "lab/secret/step10")
    settings(root / "lab/secret", private=True)
    return serve_root()


def asked_of(hub, start=""):
    lines = (f"{entry['method']} {entry['path']}" for entry in hub.log)
    return [line for line in lines if line.startswith(start)]


def numbers(row):
    """Return a measurement without what it took, where it lies, and the Hub's git ids in hashes."""
    left_out = ("seconds", "evidence", "evidence_sha256", "sha256", "weights_sha256")
    hashes = row.get("weights_sha256", {}).items()
    weights = {name: sha256 for name, sha256 in hashes if name.endswith(".safetensors")}
    return {key: row[key] for key in row if key not in left_out} | {"weights": weights}


def planned(text):
    """Return the lines of a plan, without those that change from one moment to the next."""
    lines = text.splitlines()
    stop = next((k for k, line in enumerate(lines) if line.startswith("time ")), len(lines))
    return [line for line in lines[:stop] if not line.startswith(("memory ", "disk "))]


# ------------------------------------------------------------------------------- plan, lock, resume


def test_a_scan_is_planned_fetches_once_and_asks_nothing_again(hub, scan, online, monkeypatch):
    plan = json.loads(scan(REPO, "--dry-run", "--json", "--set", "disk_budget=50MB").out)
    assert [subject["label"] for subject in plan["subjects"]] == [*LABELS, "main"]
    assert all(len(checkpoint["commit"]) == 40 for checkpoint in plan["checkpoints"])
    files = (online / "root" / REPO).rglob("*.safetensors")
    nbytes = sum(file.stat().st_size for file in files)  # `main` is the last of them
    assert plan["traffic"]["nbytes_to_fetch"] == nbytes
    assert plan["traffic"]["nbytes_disk_budget"] == 50_000_000
    assert any("`main`" in finding["message"] for finding in plan["findings"])
    (header,) = hub.asked("GET /cdn/.*")  # one stands for all files of its size
    assert header["status"] == 206
    assert sum("/tree/" in line for line in asked_of(hub)) <= 4
    assert sum(line.endswith("/refs") for line in asked_of(hub)) == 1
    dry = scan(REPO, "--dry-run")
    assert planned(dry.out)[0].startswith("plan     4 checkpoints, 1 scheme")
    assert (weights_in(online / "hf"), OUT.exists()) == ([], False)
    hub.log.clear()
    with monkeypatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        done = scan(REPO, "--dry-run", code=0)
        assert f"offline: the revisions of `{REPO}` are those of 20" in done.err
        refused(scan("lab/other"), 4, "`lab/other`", "HF_HUB_OFFLINE")
        done = scan(REPO, "--out", "offline")  # planned, and no weights are here
        assert done.code in (3, 4), done.err
        assert "HF_HUB_OFFLINE" in done.err
    assert asked_of(hub) == []

    assert scan(REPO, code=0).err.splitlines()[0] == planned(dry.out)[0]
    lock = json.loads((OUT / "plan.json").read_text(encoding="utf-8"))["resolved"]
    pinned = {c["ref"]["revision"]: c["commit"] for c in lock["checkpoints"]}
    assert pinned["step200"] == hub.repos[REPO].branches["step200"]
    weights = asked_of(hub, "GET /cdn/")
    assert len(weights) == len(set(weights)) == 3
    hub.log.clear()
    scan(REPO, code=0)
    assert asked_of(hub) == []


def test_a_lock_is_measured_elsewhere_and_weights_leave_diagnosed(hub, scan, qaudit, place, online):
    few = ("--checkpoints", "step10", "--checkpoints", "step200")
    tight = (REPO, *few, "--set", "disk_budget=1MB")
    assert scan(*tight).code == 0
    assert weights_in(online / "hf") == []  # measured, and not needed any more
    # Measured first, diagnosed by a later scan: fetched once more, and then never again.
    first = audit_of()["measurements"]
    assert scan(*tight, "--set", "diagnostics=weights").code == 0
    assert weights_in(online / "hf") == []
    tables = audit_of()["diagnostics"]
    assert [row["subject"] for row in tables["weights"] if row["part"] == "model"] == LABELS[:2]
    hub.log.clear()
    assert scan(*tight, "--set", "diagnostics=weights").code == 0
    assert not hub.asked("safetensors")

    further = ("--schemes", "rtn-4bit", "--out")  # the lock says which text
    hub.log.clear()
    qaudit("scan", "out/plan.json", *further, "second", code=0)
    assert not hub.asked("/api/")  # no name, no tree
    for checkpoint in read_lock(OUT / "plan.json")[1].checkpoints:
        open_hub().fetcher.weights(checkpoint)
    hub.log.clear()
    qaudit("scan", "out/plan.json", *further, "third", code=0)
    assert asked_of(hub) == []
    for name in ("second", "third"):
        rows = audit_of(place / name)["measurements"]
        assert list(map(numbers, rows)) == list(map(numbers, first))


def test_a_lock_is_kept_refused_or_made_anew(hub, place, qaudit, scan):
    asked = (REPO, "--checkpoints", "step10")
    assert scan(*asked).code == 0
    lock = OUT / "plan.json"
    for words, sentence, hint in (
        ("series", "other targets are given beside it", "by itself"),
        ("--checkpoints step200", "`checkpoints` would change that", "leave it out"),
        ("--soup a+b", "`soups` would change that", "leave it out"),
        ("--set last=1", "`last` would change that", "leave it out"),
        ("--evaluation other.jsonl", "`evaluation` would change that", "leave it out"),
    ):
        refused(qaudit("scan", lock, *words.split()), 2, sentence, hint)
    audit = json.loads(qaudit("scan", "out/plan.json", "--schemes", "rtn-3bit", "--json").out)
    assert [row["scheme"] for row in audit["measurements"]] == ["fp", "rtn-3bit"]
    assert audit_of(place / "qaudit-out" / "out") == audit

    whole = lock.read_text(encoding="utf-8")
    lock.write_text(whole[:100], encoding="utf-8")
    refused(scan(*asked), 2, "cannot be read", "pass `--set update=true`")
    assert scan(*asked, "--set", "update=true").code == 0
    assert json.loads(lock.read_text(encoding="utf-8"))["resolved"] == json.loads(whole)["resolved"]

    branches = hub.repos[REPO].branches
    was, branches["step10"] = branches["step10"], branches["step200"]
    hub.log.clear()
    scan(*asked, "--schemes", "rtn-3bit", code=0)
    assert not hub.asked("/api/")  # weights that were evicted come again, from where they were
    assert [s["commit"] for s in audit_of()["subjects"]] == [was]
    moved = scan(*asked, "--schemes", "rtn-3bit", "--set", "update=true")
    assert f"it was at {was[:10]}" in " ".join(moved.err.split())
    assert [s["commit"] for s in audit_of()["subjects"]] == [branches["step10"]]


def test_changed_folders_refuse_a_lock_and_kept_weights_stay_here(hub, place, qaudit, scan, online):
    both = (f"{REPO}@step10", "series/step200", "--schemes", ROUNDED, "--keep", ROUNDED)
    scan(*both, code=0)
    shutil.copy(place / "series/step1000/model.safetensors", place / "series/step200")
    refused(qaudit("scan", "out/plan.json"), 2, "have changed since", "targets themselves")
    scan(*both, code=0)  # planned anew
    for weights in weights_in(online / "hf"):
        weights.unlink()
    hub.log.clear()
    named = ("--subject", "step10", "--scheme", ROUNDED)
    done = qaudit("export", "out", *named, "--out", "new", code=0)
    assert "written from the weights that the scan kept" in done.err
    assert asked_of(hub) == []


def test_a_scan_of_the_hub_reads_c4_where_no_text_was_named(place, online, qaudit, serve_root):
    folder = online / "root/datasets/allenai/c4/main/en"
    folder.mkdir(parents=True)
    for name, first in (("train.00001-of-01024", 300), ("validation.00000-of-00008", 400)):
        lines = (json.dumps({"text": text(seed)}) for seed in range(first, first + 10))
        (folder / f"c4-{name}.json.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    shutil.copytree(place / "series/step10", online / "root" / REPO / "step10")
    hub = serve_root()
    qaudit("scan", f"{REPO}@step10", "--schemes", "rtn-4bit", "--out", "out", code=0)
    (fp, _) = audit_of()["measurements"]
    assert fp["documents"] == 10
    lock = json.loads((OUT / "plan.json").read_text(encoding="utf-8"))["resolved"]
    assert sorted(t["path"] for t in lock["texts"]) == [
        "en/c4-train.00001-of-01024.json.gz", "en/c4-validation.00000-of-00008.json.gz",
    ]  # fmt: skip
    texts = max(k for k, line in enumerate(asked_of(hub)) if "/datasets/" in line)
    weights = [k for k, line in enumerate(asked_of(hub)) if line.endswith("model.safetensors")]
    assert weights[-1] > texts  # the first is a range, its header


# ------------------------------------------------------------------------------- what goes wrong


def test_what_cannot_be_fetched_is_refused_with_a_remedy(hub, scan, place, online, monkeypatch):
    sentence = "`lab/secret` does not exist, or is private"
    refused(scan("lab/secret"), 4, sentence, "`hf auth login` or set `HF_TOKEN`")
    (place / "mounts").write_text("server:/x / nfs4 rw 0 0\n")
    with monkeypatch.context() as patched:
        patched.setattr("qaudit.host.MOUNTS", place / "mounts")
        done = scan(REPO, "--set", "disk_budget=50MB")
    refused(done, 4, "network file system (nfs4)", "leave out `disk_budget`")
    asked = (REPO, "--checkpoints", "step10", "--set")
    done = scan(*asked, "disk_budget=100KB")
    refused(done, 4, "100 kB may be used", "give `--set disk_budget=")
    assert (weights_in(online / "hf"), OUT.exists()) == ([], False)
    proposed = done.err.partition("disk_budget=")[2].partition("`")[0]
    assert scan(*asked, f"disk_budget={proposed}").code == 0


def test_files_of_repositories_are_fetched_and_pinned(hub, scan, online):
    gguf = "lab/series-GGUF@v1//files/series-{}.gguf"
    base = f"{REPO}@step10"
    missing = scan(base, "--shipped", gguf.format("Q5_0"))
    refused(missing, 4, "there is no file `files/series-Q5_0.gguf`", "files/series-Q")
    both = ("--shipped", "lab/series-GPTQ@v1", "--shipped", gguf.format("Q4_0"))
    refused(scan(base, *both, "--set", "disk_budget=90kB"), 4, "needs", "disk_budget=")
    scan(base, *both, "--set", "disk_budget=1MB", code=0)
    rows = audit_of()["measurements"]
    assert [r["scheme"] for r in rows] == ["fp", "rtn-4bit", "series-GPTQ", "series-Q4_0"]
    assert "gguf" in rows[-1]["spec"]
    lock = json.loads((OUT / "plan.json").read_text())
    gptq, file = lock["resolved"]["shipped"]
    assert (len(gptq["commit"]), len(file["commit"])) == (40, 40)
    size = (online / "root/lab/series-GGUF/v1/files/series-Q4_0.gguf").stat().st_size
    assert file["files"][0]["nbytes"] == size
    nbytes = size + sum(file["nbytes"] for file in gptq["files"])
    assert audit_of()["plan"]["traffic"]["nbytes_to_fetch"] >= nbytes
    assert not [line for line in asked_of(hub) if "Q8_0" in line]
    assert weights_in(online / "hf") == []  # measured, and not needed any more
    hub.log.clear()
    assert scan(base, *both, "--set", "disk_budget=1MB").code == 0
    # Of a file that was evicted the header is read again, for the plan.
    assert len([e for e in hub.asked("GET /cdn/") if e["range"] in (None, "bytes=0-")]) == 0


def test_members_stay_until_a_soup_is_made_within_its_budget(hub, qaudit, place, online):
    weights = online / "root" / REPO / "step10" / "model.safetensors"
    budget = 2 * weights.stat().st_size
    mix = (REPO, "--soup", "step200+step1000")
    for name, options in (("scan", QUICK), ("soup", ())):
        below = ("--set", f"disk_budget={budget - 1}B", "--out", "new")
        done = qaudit(name, *mix, *options, *below)
        refused(done, 4, "for its 2 members at once", "disk_budget=")
        assert not (place / "new" / "audit.json").exists()
    assert weights_in(online / "hf") == []

    enough = ("--set", f"disk_budget={budget}B", "--out")
    qaudit("soup", *mix, *enough, "new", code=0)
    assert (list(place.glob(".*")), (place / "new" / "config.json").exists()) == ([], True)
    assert weights_in(online / "hf") == []
    hub.log.clear()
    qaudit("scan", *mix, *QUICK, *enough, "tight", code=0)
    assert not audit_of(place / "tight")["skipped"]
    assert weights_in(online / "hf") == []
    sent = [e["path"] for e in hub.asked("GET /cdn/") if e["range"] in (None, "bytes=0-")]
    assert len(sent) == len(set(sent)) == 3  # nothing is downloaded twice


TOWERS, WORDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(folder, *, mixed=False):
    """Store the towers in one shard and the text in another; `mixed`: one tensor of them beside."""
    single = folder / "model.safetensors"
    # The tower's names in the release; transformers 5 saves shorter ones.
    tower = ("vision_tower.", "vision_tower.vision_model.")
    tensors = {name.replace(*tower): tensor for name, tensor in load_file(single).items()}
    single.unlink()
    beside = "multi_modal_projector.mm_soft_emb_norm.weight" if mixed else ""
    placed = {n: WORDS if n == beside or n.startswith("lang") else TOWERS for n in tensors}
    for file in (TOWERS, WORDS):
        part = {name: tensors[name] for name in tensors if placed[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_towers_in_shards_of_their_own_come_only_to_be_written(place, qaudit, online, serve_root):
    repo = online / "root" / "lab" / "model"
    for seed, name in enumerate(("step1", "step2")):
        save_tokenizer(released.save(repo / name, "gemma3", seed))
        shard(repo / name, mixed=bool(seed))
    shutil.copytree(repo, place / "local")
    hub = serve_root()
    options = f"--set context=32 --schemes {ROUNDED} --checkpoints step1 --soup step1+step2 --out"
    asked = (*TEXT, *options.split())
    qaudit("scan", "lab/model", *asked, "out", "--keep", ROUNDED, code=0)
    assert hub.asked(WORDS) and not hub.asked(TOWERS)
    assert {path.name for path in (online / "hf").rglob("*.safetensors")} == {WORDS}
    notes = [n for n in audit_of()["plan"]["notes"] if "not downloaded" in n]
    assert notes and all(TOWERS in note and note in whole_at(OUT) for note in notes)

    assert qaudit("scan", "local", *asked, "of-local").code == 0
    ours, theirs = (
        {c: [r[k] for k in ("ce", "kl", "bits_per_weight")] for c, r in cells(place / name).items()}
        for name in ("out", "of-local")
    )
    assert (ours, len(ours)) == (theirs, 4)
    hub.log.clear()
    assert qaudit("scan", "lab/model", *asked, "out", "--keep", ROUNDED).code == 0
    assert not hub.asked("safetensors")  # nothing is measured

    done = qaudit("export", "out", "--subject", "step1", "--scheme", ROUNDED, "--out", "new", "-q")
    assert done.code == 0, done.err
    assert hub.asked(TOWERS)
    written = load_file(place / "new" / "model.safetensors")
    stored = load_file(repo / "step1" / TOWERS)
    assert all((written[name] == tensor).all() for name, tensor in stored.items())
    done = qaudit("verify", "new", "--audit", "out", "--json", "-q")
    assert json.loads(done.out)["differences"] == []
    hub.log.clear()
    qaudit("soup", "lab/model", "--soup", "step1+step2", "--out", "soup", code=0)
    assert hub.asked(TOWERS)  # of the other member
