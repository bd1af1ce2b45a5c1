"""The commands of the pages do what the pages say: they are run, in a folder as the pages see it.

One small slice of the demo is measured, by the command of the tutorial, and lies under every name
that the pages use. The Hub is a local one. Scans and experiments of other pages are only planned,
which finds every target, soup and option. What can only be done at length is marked slow, and what
needs a repository that no test has is parsed, by `tests/house/test_docs.py`.
"""

import gzip
import json
import re
import shlex
import shutil

import pytest

from tests.house.source import PACKAGE, ROOT
from tests.house.test_docs import shown
from tests.support.hub import Hub
from tests.support.saved_audits import stub_pictures

DEMO, DOCS = PACKAGE / "demo", ROOT / "docs"
FAMILY = PACKAGE / "families" / "demo.yaml"
TUTORIAL = DOCS / "tutorial.md"
OTHERS = [page for page in sorted(DOCS.glob("*.md")) if page.name not in ("tutorial.md",)]

MODEL = "allenai/OLMo-2-0425-1B"
REVISIONS = {"stage1-step1900000-tokens3985B": "stage1-step5000",
             "stage2-ingredient3-step23000-tokens49B": "stage2-ingredient3-step1000"}  # fmt: skip
SERVED = (MODEL, "org/name")
NAMED = {"A": "stage1-step500", "B": "stage1-step1000", "C": "stage1-step1750",
         "D": "stage1-step2500"}  # fmt: skip
BRANCHES = ("stage2-ingredient2-step1000", "stage2-ingredient3-step1000")
"""Not of one's own run: it has one end, as `last:4` needs it."""

UNCLEAR = {"gate": (0, 1, 3), "pick": (0, 3), "collect": (0, 3), "status": (0, 3)}
"""Codes of commands that answer by them; of all others it is 0."""

WRITING = ("plan", "fetch", "part", "collect")
"""Commands whose result is in files: stdout may stay empty."""


def words_of(line):
    return shlex.split(line, comments=True)[1:]


def is_run(words):
    """Say whether a test has what a command needs: its repository, its files, and the time."""
    names = [
        word.partition("@")[0] for word in words[1:] if re.match(r"[\w.-]+/[\w.-]+(@|$)", word)
    ]
    others = ("allenai/", "HuggingFaceTB/", "org/", "recipes/")
    elsewhere = any(name not in SERVED and name.startswith(others) for name in names)
    absent = any(
        re.search(r"lm-eval/|^hf://|@v1$|\.lock\.json$|\.jsonl$|\.py$", word) for word in words
    )
    signed = "sign=true" in words or "--signed" in words  # needs a key; `tests/cli/test_signed.py`
    return not (elsewhere or absent or signed)


def planned(words):
    """Let what measures, or opens a pull request, only say what it would do."""
    costly = words[0] in ("scan", "publish")
    return [*words, "--dry-run"] if costly and "--dry-run" not in words else words


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Serve the repositories that the pages name, with checkpoints of the demo in them."""
    root = tmp_path_factory.mktemp("hub")
    for revision, checkpoint in REVISIONS.items():
        shutil.copytree(DEMO / checkpoint, root / MODEL / revision)
    texts = root / "datasets" / "allenai" / "c4" / "main" / "en"
    texts.mkdir(parents=True)
    for name in ("train.00001-of-01024", "validation.00000-of-00008"):
        rows = (json.dumps({"text": f"{k} foxes of {name} jump"}) + "\n" for k in range(200))
        (texts / f"c4-{name}.json.gz").write_bytes(gzip.compress("".join(rows).encode()))
    (root / "org" / "name" / "main").mkdir(parents=True)
    (root / "org" / "name" / "main" / "README.md").write_text("# Name\n", encoding="utf-8")
    with Hub(root).running() as hub:
        yield hub


@pytest.fixture
def place(hub, tmp_path, monkeypatch):
    """Return an empty folder to work in, but for checkpoints of one's own."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("qaudit.report.folder.write", stub_pictures)
    folder = tmp_path / "place"
    series = {path.name: path.name for path in DEMO.glob("stage*") if path.name not in BRANCHES}
    for name, checkpoint in {**series, **NAMED}.items():
        shutil.copytree(DEMO / checkpoint, folder / "runs" / "my-model" / name)
    shutil.copy(FAMILY, folder / "runs" / "my-model" / "qaudit-family.yaml")
    (folder / "runs" / "one").symlink_to("my-model")
    monkeypatch.chdir(folder)
    return folder


def furnish(place):
    """Lay what was measured, and the policy of its page, where the other pages have them."""
    for name in ("qaudit-out/olmo", "qaudit-out/mine", "qaudit-out/new", "audits/candidate",
                 "audits/released", "qaudit-out/allenai-OLMo-2-1124-7B"):  # fmt: skip
        shutil.copytree(place / "qaudit-out" / "demo", place / name)
    policy = re.search(r"^```yaml\n(.*?)^```", (DOCS / "policy.md").read_text("utf-8"), re.M | re.S)
    assert policy is not None
    (place / "ci").mkdir()
    for path in (place / "ours.yaml", place / "ci" / "policy.yaml"):
        path.write_text(policy[1], encoding="utf-8")


@pytest.mark.slow
def test_the_commands_of_the_pages_run(place, qaudit, subtests):
    for line in shown(TUTORIAL):
        with subtests.test(page=TUTORIAL.name, line=line):
            done = qaudit(*words_of(line))
            assert done.code in UNCLEAR.get(words_of(line)[0], (0,)), done.err
            assert "error: " not in done.err
            assert done.out.strip()
    furnish(place)
    for page in OTHERS:
        for line in shown(page):
            words = words_of(line)
            if not is_run(words):
                continue
            with subtests.test(page=page.name, line=line):
                done = qaudit(*planned(words))
                assert done.code in UNCLEAR.get(words[0], (0,)), done.err
                assert done.out.strip() or "--into" in words or words[0] in WRITING


def test_most_commands_of_the_pages_are_run():
    lines = [line for page in OTHERS for line in shown(page)]
    assert sum(is_run(words_of(line)) for line in lines) > 0.7 * len(lines)
