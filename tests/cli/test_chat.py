"""A scan of conversations as its user sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cards import whole_at
from tests.support.cli import Run, audit_of, refused
from tests.support.models import text

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}{# <think> </think> #}"
)
TEXT = ("--calibration", "fed.jsonl", "--evaluation", "talks.jsonl", "--schemes", "rtn-4bit")
SCAN = ("scan", "series/step10", *TEXT, "--out", "out")


def talk(seed: int) -> list[dict[str, str]]:
    answer = f"<think>{text(seed, 6)}</think>{text(seed + 1, 6)}"
    return [
        {"role": "user", "content": text(seed + 2, 4)},
        {"role": "assistant", "content": answer},
    ]


def write_talks(path: Path, seeds: range, **more: Any) -> None:
    path.write_text("".join(json.dumps({"messages": talk(k), **more}) + "\n" for k in seeds))


@pytest.fixture
def talks(place: Path) -> Path:
    (place / "series" / "step10" / "chat_template.jinja").write_text(TEMPLATE)
    write_talks(place / "talks.jsonl", range(0, 80, 10))
    write_talks(place / "fed.jsonl", range(1000, 1080, 10))
    return place


def test_conversations_are_scored_by_role_and_once(talks: Path, qaudit: Run) -> None:
    done = qaudit(*SCAN)
    assert done.code == 0, done.err
    evidence = {path: path.stat().st_mtime_ns for path in (talks / "out").rglob("*.npz")}
    assert qaudit(*SCAN).code == 0
    assert {path: path.stat().st_mtime_ns for path in (talks / "out").rglob("*.npz")} == evidence
    audit: Any = audit_of(talks / "out")
    rows = audit["diagnostics"]["roles"]
    cells = {(row["scheme"], row["role"]) for row in rows}
    assert cells == {(s, r) for s in ("fp", "rtn-4bit") for r in ("reasoning", "answer")}
    (measured,) = (row for row in audit["measurements"] if row["scheme"] == "rtn-4bit")
    of_roles = [row for row in rows if row["scheme"] == "rtn-4bit"]
    assert sum(row["tokens"] for row in of_roles) == measured["tokens"]
    assert all(row["kl"] > 0 for row in of_roles)
    sources = audit["plan"]["protocol"]["sources"]
    assert sources["chat_template"] == "that of step10"
    assert len(sources["chat_template_sha256"]) == 64
    assert "by role in the conversation" in whole_at(talks / "out")


def test_strict_warns_of_a_chat_model_that_kl_does_not_rank(talks: Path, qaudit: Run) -> None:
    done = qaudit(*SCAN[:6], "--schemes", "rtn-8bit", "--policy", "strict", "--out", "out")
    assert done.code == 0, done.err
    audit: Any = audit_of(talks / "out")
    assert audit["plan"]["protocol"]["has_chat_template"] is True
    (decision,) = audit["verdict"]["classes"]
    assert any("neither tasks nor rollouts were measured" in w for w in decision["warnings"])
    gated = qaudit("gate", "out", "--policy", "strict")
    assert "neither tasks nor rollouts were measured" in gated.out
    assert "neither tasks nor rollouts" not in qaudit("gate", "out").out


def test_all_tokens_are_scored_on_request(talks: Path, qaudit: Run) -> None:
    assert qaudit(*SCAN, "--set", "score=all").code == 0
    audit: Any = audit_of(talks / "out")
    assert {row["role"] for row in audit["diagnostics"]["roles"]} == {
        "prompt",
        "reasoning",
        "answer",
    }
    assert audit["plan"]["protocol"]["sources"]["scored"] == "all"


def test_a_checkpoint_without_a_template_is_refused_before_it_is_measured(
    talks: Path, qaudit: Run
) -> None:
    (talks / "series" / "step10" / "chat_template.jinja").unlink()
    done = qaudit(*SCAN)
    refused(done, 2, "`step10` has no chat template", "`--set chat_template=FILE`")
    assert not (talks / "out" / "evidence").exists()


def test_a_hostile_template_ends_the_plan(talks: Path, qaudit: Run) -> None:
    (talks / "bomb.jinja").write_text("{{ 'a' * 10**10 }}")
    done = qaudit(*SCAN, "--set", "chat_template=bomb.jinja")
    refused(done, 2, "line 1 of `talks.jsonl` cannot be rendered", "`--set chat_template=FILE`")
