"""What strangers ask of every command but a scan: a sentence, a hint, and nothing is written."""

import json
import shlex
import shutil

import pytest

from qaudit.saved.audits import to_json
from tests.support import sample
from tests.support.cli import ROUNDED, TEXT, edited, flipped, refused
from tests.support.saved_audits import save

WORDS = " ".join(TEXT)
CELL = f"export series/step200 {WORDS} --scheme {ROUNDED} --out new2"
ALL = f"export series {WORDS} --scheme rtn-4bit --out new2"
GGUF = f"export series/step200 {WORDS} --scheme gguf-q4_0 --format gguf --out new2 --converter"
SOUP = "soup --out new2 series --soup"
AGAIN, VERIFY = "run the same scan again", "verify new --audit"
CONTENTS = {
    "nested": b"[" * 100_000,
    "blank": b"",
    "half": b'{"schema": ',
    "list": b"[]",
    "table": b"{}",
    "word": b'"audit"',
    "keys": b'{"schema": "1"}',
    "null": b"null",
    "bytes": bytes(range(128, 256)),
}
"""Of an `audit.json` each."""


@pytest.fixture(scope="module")
def shelf(audited, tmp_path_factory):
    """Return a folder with what commands read: an audit and its export, and what is wrong."""
    place = shutil.copytree(audited, tmp_path_factory.mktemp("shelf") / "place")
    for name, documents in (("saved", 16), ("fewer", 12), ("bad", 12)):
        save(place / name, documents=documents)
    flipped(next((place / "bad" / "evidence").glob("*.npz")))
    shutil.copytree(place / "out", place / "other")
    edited(place / "other/audit.json", lambda audit: audit["plan"].update(dtype="float16"))
    shutil.copytree(place / "series" / "step10", place / "damaged")
    weights = place / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    sampled = json.loads(to_json(sample.audit()))
    rows = [{k: v for k, v in row.items() if k != "ce"} for row in sampled["measurements"]]
    edits = {"later": {"schema": "99", "qaudit": "9.1"}, "one": {"schema": "one"},
             "less": {"measurements": rows}}  # fmt: skip
    written = {name: json.dumps({**sampled, **values}).encode() for name, values in edits.items()}
    for name, content in {**CONTENTS, **written}.items():
        (place / name).mkdir()
        (place / name / "audit.json").write_bytes(content)
    (place / "empty").mkdir()
    for name, content in {
        "empty/x": b"",
        "card.md": b"# A card\n",
        "model.gguf": b"GGUF",
        "README.md": b"<!-- qaudit:begin -->\nmine\n",
        "BAD.md": b"\xff\xfe\x00",
    }.items():
        (place / name).write_bytes(content)
    return place


REFUSED = [
    # what a first user gets wrong
    ("report card.md", 2, "`card.md` is not an audit", "an output folder"),
    ("gate card.md", 2, "`card.md` is not an audit", "an output folder"),
    ("scan model.gguf", 2, "is a quantized file", "`--shipped model.gguf`"),
    ("export series --bits 4 --out new2", 2, "no audit at `series`", "`qaudit scan series`"),
    ("export none --bits 4 --out new2", 2, "there is no audit at `none`", "an output folder"),
    ("gate saved --policy series", 2, "`series` is a folder", "explore"),
    ("scna series", 2, "No such command 'scna'. Did you mean 'scan'?", "`qaudit --help`"),
    *(
        (command, 2, "", "")
        for command in (
            f"scan series {WORDS} --policy {'p' * 5000}",
            f"scan {'t' * 5000} --dry-run",
            f"scan series --evaluation {'e' * 5000} --dry-run",
            f"gate {'a' * 5000}",
            f"export {'a' * 5000} --out new2",
        )
    ),
    # export
    ("export series/step200 --out new2", 2, "nothing says which scheme ships", "--scheme"),
    (ALL, 2, "has 3 checkpoints", "--subject step1000"),
    (f"{ALL} --subject step2", 2, "no subject `step2`", "step200"),
    (f"{CELL} --format mxl", 2, "`mxl` is not a format", "mlx"),
    (f"{CELL} --out series", 2, "exists already", "does not exist yet"),
    (f"{CELL} --converter a.py", 2, "no metadata", "--format gguf"),
    (f"{CELL} --format gguf", 2, "needs metadata", "convert_hf_to_gguf.py"),
    (f"{GGUF} no.gguf", 2, "no file `no.gguf`", "convert_hf_to_gguf.py"),
    (f"{GGUF} model.gguf", 4, "cut short", "download"),
    # verify
    ("verify series/step200", 2, "no `qaudit-export.json`", "qaudit export"),
    (f"{VERIFY} series", 2, "audit", "audit"),
    (
        f"{VERIFY} out --runtime gptqmodel",
        2, "`gptqmodel` is no runtime here that loads `compressed-tensors`", "transf",
    ),
    (f"{VERIFY} out --runtime vllm", 4, "vllm is not installed", "qaudit-llm[vllm]"),
    # soup
    ("soup series --out new2", 2, "3 checkpoints are in series, ", "last:4"),
    (f"{SOUP} subsets:2(step*)", 2, "makes 3 soups", "one of them"),
    (f"{SOUP} best=greedy(step*)", 2, "the members of `best` are chosen by measuring", "scan"),
    (
        "soup series/step10 --soup step10+step200 --out new2",
        2, "no checkpoint `step200`", "step10",
    ),
    ("soup serie --soup late=last:2 --out new2", 2, "there is no folder `serie`", "series"),
    (f"{SOUP} last:2 --set context=9", 2, "takes no `context`", "disk_budget"),
    (f"{SOUP} last:2 --out series", 2, "exists already", "does not exist yet"),
    (
        "soup damaged series/step200 --soup damaged+step200 --out new2",
        4, "model.safetensors", "again",
    ),
    # pick
    ("pick out --objective los", 2, "there is no objective `los`", "loss"),
    ("pick out --objective loss@gptq-2bit", 2, "nothing was measured at `gptq-2bit`", "rtn"),
    ("pick out out", 2, "an audit is named twice", "once"),
    ("pick out --bits 4bit", 2, "`4bit` of `--bits` is not a number of bits", "4,3"),
    ("pick out --policy relase", 2, "there is no policy `relase`", "release"),
    ("pick nowhere", 2, "there is no folder `nowhere`", ""),
    ("pick qaudit-out/none", 2, "there is no folder `qaudit-out/none`", ""),
    ("pick fewer saved", 2, "were measured on different documents", "same"),
    ("pick out other", 2, " and `other` with float16", "alike"),
    # report
    ("report saved --format html5", 2, "no format `html5`", "md, html, terminal"),
    ("report elsewhere", 2, "no audit at `elsewhere`", "output folder"),
    ("report empty", 2, "no audit at `empty`", "output folder"),
    *((f"report {name}", 2, "not whole JSON", AGAIN) for name in ("nested", "blank", "half")),
    *(
        (f"report {name}", 2, "this is not an audit of qaudit", "`audit.json`")
        for name in ("list", "table", "word", "keys", "null")
    ),
    ("report bytes", 2, "`bytes/audit.json` cannot be read", AGAIN),
    ("report later", 2, "schema version 99", "install qaudit 9.1 or later"),
    ("report one", 2, "schema version `one`", AGAIN),
    ("report less", 2, "`audit.measurements[0].ce` is missing", AGAIN),
    ("report saved --into README.md", 2, "`qaudit:begin` in line 1", "or none, and try"),
    ("report saved --into BAD.md", 2, "cannot be read as text", "UTF-8"),
    ("report saved --into typo/README.md", 2, "no folder `typo`", "fix the path"),
    (
        "report saved --format json --into README.md",
        2, "`json` is not the card", "leave `--format` out",
    ),
    # publish, which asks no Hub
    ("publish none m", 2, "`m` is no name of a repository", "write `org/name`"),
    ("publish none alice/m@v1", 2, "`alice/m@v1` names a revision", "write `org/name`"),
    ("publish none ../m", 2, "is no name of a repository", "write `org/name`"),
    ("publish none alice/m/deeper", 2, "is no name of a repository", "write `org/name`"),
    ("publish qaudit-out alice/m", 2, "there is no audit at", "qaudit scan"),
    ("publish bad alice/m", 4, "is not the evidence that the audit was made from", "again"),
    # other commands
    ("diff none none", 2, "there is no audit", "output folder"),
    ("diff out out --format html", 2, "no format `html`", "terminal"),
    ("explain four-bit-tails", 2, "nothing is called", "four-bit-tail"),
    ("explain nf4", 2, "nothing is called", "did you mean `bnb-nf4`?"),
    ("explain 'a long note'", 2, "nothing is called", "--audit FOLDER"),
    ("list scheme", 2, "no list of `scheme`", "did you mean `schemes`?"),
    *(
        (command, 2, "has no plan", "qaudit plan TARGET --out")
        for command in ("part series --part 0/1", "collect series", "status series")
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=[f"{c[0][:40]}: {c[2][:20]}" for c in REFUSED])
def test_what_is_wrong_is_refused_in_words(shelf, qaudit, monkeypatch, case):
    words, code, sentence, hint = case
    monkeypatch.chdir(shelf)
    if words.startswith(CELL):  # refused before the target is read
        monkeypatch.setattr("qaudit.export.choice.prepare", None)
    before = {path: path.stat().st_mtime_ns for path in shelf.rglob("*")}
    done = qaudit(*shlex.split(words))
    refused(done, code, sentence, hint)
    assert len(done.err) < 8000
    assert {path: path.stat().st_mtime_ns for path in shelf.rglob("*")} == before
