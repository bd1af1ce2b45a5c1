"""Conversations and documents in groups, as the user of a scan sees them."""

import json

import pytest

from qaudit.saved.results import read_measurement
from tests.support.cards import whole_at
from tests.support.cli import OUT, audit_of, refused
from tests.support.models import text

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}{# <think> </think> #}"
)
TEXT = ("--calibration", "fed.jsonl", "--evaluation", "talks.jsonl")
SCHEMES = ("rtn-4bit", "rtn-8bit")
SCAN = ("scan", "series/step10", *TEXT, "--schemes", ",".join(SCHEMES), "--out", "out")


def talk(seed):
    answer = f"<think>{text(seed, 6)}</think>{text(seed + 1, 6)}"
    return [
        {"role": "user", "content": text(seed + 2, 4)},
        {"role": "assistant", "content": answer},
    ]


def write_talks(path, seeds, **more):
    path.write_text("".join(json.dumps({"messages": talk(k), **more}) + "\n" for k in seeds))


@pytest.fixture
def talks(place):
    (place / "series" / "step10" / "chat_template.jinja").write_text(TEMPLATE)
    write_talks(place / "talks.jsonl", range(0, 80, 10))
    write_talks(place / "fed.jsonl", range(1000, 1080, 10))
    return place


def test_conversations_are_scored_by_role_and_once_and_strict_warns_of_what_kl_does_not_rank(
    talks, qaudit
):
    qaudit(*SCAN, "--policy", "strict", code=0)
    evidence = {path: path.stat().st_mtime_ns for path in OUT.rglob("*.npz")}
    qaudit(*SCAN, "--policy", "strict", code=0)
    assert {path: path.stat().st_mtime_ns for path in OUT.rglob("*.npz")} == evidence
    audit = audit_of()
    rows = audit["diagnostics"]["roles"]
    cells = {(row["scheme"], row["role"]) for row in rows}
    assert cells == {(s, r) for s in ("fp", *SCHEMES) for r in ("reasoning", "answer")}
    (measured,) = (row for row in audit["measurements"] if row["scheme"] == "rtn-4bit")
    of_roles = [row for row in rows if row["scheme"] == "rtn-4bit"]
    assert sum(row["tokens"] for row in of_roles) == measured["tokens"]
    assert all(row["kl"] > 0 for row in of_roles)
    protocol = audit["plan"]["protocol"]
    sources = protocol["sources"]
    assert (protocol["has_chat_template"], sources["chat_template"]) == (True, "that of step10")
    assert len(sources["chat_template_sha256"]) == 64
    assert "by role in the conversation" in whole_at(OUT)
    (decision,) = (one for one in audit["verdict"]["classes"] if one["bit_class"] == "8")
    assert any("neither tasks nor rollouts were measured" in w for w in decision["warnings"])
    gated = qaudit("gate", "out", "--policy", "strict")
    assert "neither tasks nor rollouts were measured" in gated.out
    assert "neither tasks nor rollouts" not in qaudit("gate", "out").out


def test_all_tokens_are_scored_on_request_by_a_template(talks, qaudit):
    qaudit(*SCAN, "--set", "score=all", code=0)
    audit = audit_of()
    roles = {row["role"] for row in audit["diagnostics"]["roles"]}
    assert roles == {"prompt", "reasoning", "answer"}
    assert audit["plan"]["protocol"]["sources"]["scored"] == "all"
    (talks / "series" / "step10" / "chat_template.jinja").unlink()
    done = qaudit(*SCAN, "--out", "new")
    refused(done, 2, "`step10` has no chat template", "`--set chat_template=FILE`")
    assert not (talks / "new" / "evidence").exists()
    (talks / "bomb.jinja").write_text("{{ 'a' * 10**10 }}")
    done = qaudit(*SCAN, "--set", "chat_template=bomb.jinja")
    refused(done, 2, "line 1 of `talks.jsonl` cannot be rendered", "`--set chat_template=FILE`")


@pytest.fixture
def grouped(place):
    """Give evaluation documents two fields."""
    lines = [
        {"text": text(200 + k), "source": ("web", "code")[k % 3 > 0], "half": k // 6, "id": k}
        for k in range(12)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    (place / "evaluation.jsonl").write_text(content, encoding="utf-8")
    return place


def test_another_field_needs_no_new_measurement_and_has_to_group(grouped, scan):
    scan("series/step10", code=0)
    seconds = [row["seconds"] for row in audit_of()["measurements"]]
    for field, expected in (
        ("source", ("web", "code", "code") * 4),
        ("half", ("0",) * 6 + ("1",) * 6),
        (None, ()),
    ):
        scan("series/step10", *(["--set", f"strata={field}"] if field else []), code=0)
        audit = audit_of()
        assert [row["seconds"] for row in audit["measurements"]] == seconds
        files = [OUT / row["evidence"] for row in audit["measurements"]]
        assert {read_measurement(file).evidence.strata for file in files} == {expected}
        rows = audit["diagnostics"].get("strata", [])
        assert {row["stratum"] for row in rows} == set(expected)
        assert all((row["kl"] is None) == (row["scheme"] == "fp") for row in rows)
        assert audit["plan"]["protocol"]["sources"].get("strata") == field
    (grouped / "evaluation.txt").write_text("one two three", encoding="utf-8")
    for options, sentence, hint in (
        ("--set strata=origin", "no value of the field `origin`", "its fields are text"),
        ("--set strata=id", "each of the 12 evaluation documents", "strata=source"),
        ("--set strata=source --set packed=true", "packed windows", "leave out `packed`"),
        ("--set strata=source --evaluation evaluation.txt", "is plain text", "`--evaluation`"),
    ):
        refused(scan("series/step10", "--dry-run", *options.split()), 2, sentence, hint)
