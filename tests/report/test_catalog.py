"""A series as a table: what is folded, what is cut, and what is said below."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.course import NO_WEIGHTS, bad_report
from qaudit.report.plan import Catalog, catalog_to_json, render_catalog
from qaudit.types import Checkpoint, Finding, Ref, WeightFile


def checkpoint(label: str, sha: str | None = None, **known: object) -> Checkpoint:
    files = (WeightFile("w", 5_000_000, sha),) if sha else ()
    return Checkpoint(Ref("o/n", label), label, files, **known)  # type: ignore[arg-type]


def catalog(*checkpoints: Checkpoint, selected: tuple[str, ...] = (), **more: object) -> Catalog:
    return Catalog(("o/n",), checkpoints, frozenset(selected), **more)  # type: ignore[arg-type]


def table(*checkpoints: Checkpoint, selected: tuple[str, ...] = (), **how: object) -> list[str]:
    text = render_catalog(catalog(*checkpoints, selected=selected), **how)  # type: ignore[arg-type]
    return text.split("\n\n")[1].splitlines()[1:]


STEPS = tuple(checkpoint(f"step{n}", step=n, stage="s") for n in range(1000, 9001, 1000))


def test_what_is_not_known_is_a_dash_and_what_is_not_there_is_said() -> None:
    (unknown, empty, zero) = table(
        checkpoint("a"),
        checkpoint("b", suspect=(NO_WEIGHTS,)),
        checkpoint("c", "1", step=0, tokens=0, learning_rate=0.0, stage="s", ingredient=2),
    )
    assert unknown.split() == ["a", "-", "-", "-", "-", "-"]
    assert empty.split() == ["b", "-", "-", "-", "-", "none", "1"]
    assert zero.split() == ["c", "s", "i2", "0", "0", "0", "5.0", "MB"]


def test_rows_that_say_nothing_are_folded_with_their_steps() -> None:
    rows = table(*STEPS, selected=("step6000",))
    assert rows == [
        "  ... 5 more of s, steps 1,000 to 5,000, every 1,000",
        "* step6000   s     6,000      -  -    -",
        "  step7000   s     7,000      -  -    -",
        "  step8000   s     8,000      -  -    -",
        "  step9000   s     9,000      -  -    -",
    ]
    assert len(table(*STEPS, everything=True)) == 9
    assert len(table(*(checkpoint(f"name-{k}") for k in "abcdefgh"))) == 8  # no numbers


def test_a_gap_in_the_steps_is_not_hidden() -> None:
    odd = [c for c in STEPS if c.step != 4000]
    assert table(*odd) == ["  ... 8 more of s, steps 1,000 to 9,000, mostly every 1,000"]
    uneven = [checkpoint(f"step{n}", step=n, stage="s") for n in (1, 2, 4, 8, 16)]
    assert table(*uneven) == ["  ... 5 more of s, steps 1 to 16"]


def test_what_is_odd_is_never_folded_with_what_is_not() -> None:
    bad = checkpoint("step4500", step=4500, stage="s", suspect=(bad_report("why"),))
    rows = table(*STEPS[:4], bad, *STEPS[4:])
    assert len(rows) == 3
    assert rows[1].split() == ["step4500", "s", "4,500", "-", "-", "-", "1"]


def test_checkpoints_of_one_defect_are_folded_and_numbered() -> None:
    bad = [
        checkpoint(f"step{n}", step=n, suspect=(bad_report("why", some=True),)) for n in range(99)
    ]
    (row,) = table(*bad)
    assert row.split()[-1] == "1"
    assert "99 more, steps 0 to 98" in row


def test_sentences_stand_once_below_with_the_rows_they_hold_for() -> None:
    text = render_catalog(
        catalog(
            checkpoint("a", "1", step=1, notes=("inferred",)),
            checkpoint("b", "1", step=2, suspect=("odd",)),
            checkpoint("c", "2", step=3, notes=("not shown",), suspect=("odd",)),
            selected=("a",),
            findings=(
                Finding("QA015", "warn", "c", None, "`c` is a mix", "leave it"),
                Finding("QA009", "warn", "a", None, "told in the table", ""),
            ),
            remarks=("a remark",),
        )
    )
    assert [line.split()[-1] for line in text.splitlines()[3:6]] == ["1", "1,2", "2"]
    assert "\n\n1 the same weights: a, b\n2 odd\nQA015 `c` is a mix\n\ninferred\n\n" in text
    assert "a remark" in text
    assert "told in the table" not in text
    assert "not shown" not in text


def test_one_commit_under_two_names_is_known_without_its_tree() -> None:
    pair = [checkpoint(name, commit="0" * 40) for name in ("step9", "main")]
    assert "1 one commit: step9, main" in render_catalog(catalog(*pair))


def test_a_size_without_a_hash_is_a_size() -> None:
    text = render_catalog(catalog(checkpoint("a"), nbytes={"a": 7_000_000}))
    assert "7.0 MB" in text
    assert "1 checked" in text
    assert "not checked" not in text
    assert "not checked (`--check`" in render_catalog(catalog(checkpoint("a")))


def test_names_that_do_not_fit_are_cut_in_their_middle() -> None:
    long = checkpoint(
        "stage2-ingredient1-step11931-tokens50B-with-a-long-tail-that-goes-on", step=1
    )
    (row,) = table(long, width=80)
    assert len(row) <= 80
    assert row.startswith("  stage2-")
    assert "..oes-on " not in row
    assert ".." in row
    assert "goes-on" in row
    (whole,) = table(long)
    assert long.label in whole


LABELS = st.text(st.characters(codec="utf-8"), max_size=200)


@given(st.lists(LABELS, min_size=1, max_size=8, unique=True), st.integers(80, 120))
def test_whatever_the_names_no_line_is_wider_and_no_cursor_moves(
    names: list[str], width: int
) -> None:
    found = [checkpoint(name, step=k, stage="stage1") for k, name in enumerate(names)]
    text = render_catalog(catalog(*found, selected=tuple(names)), width=width, everything=True)
    assert max(map(len, text.split("\n"))) <= width
    assert all(c.isprintable() for c in text if c != "\n")
    assert len(text.split("\n\n")[1].split("\n")) == 1 + len(names)


def test_json_is_whole() -> None:
    found = json.loads(catalog_to_json(catalog(*STEPS, checkpoint("x", "1"), selected=("x",))))
    assert len(found["checkpoints"]) == 10
    last = found["checkpoints"][-1]
    assert (last["ref"], last["revision"], last["selected"], last["checked"]) == (
        "o/n@x", "x", True, True,
    )  # fmt: skip
    assert found["checkpoints"][0]["nbytes"] is None
