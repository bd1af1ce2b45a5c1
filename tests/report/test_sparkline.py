from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from qaudit.report.format import BLOCKS, in_ascii, percent, width_of
from qaudit.report.series import LONGEST_LINE, sparkline, sparklines
from qaudit.report.views import View
from tests.support import sample

numbers = st.floats(-1, 1) | st.none() | st.sampled_from([float("inf"), float("nan")])


@given(st.lists(numbers, max_size=30))
def test_higher_is_never_drawn_lower(values: list[float | None]) -> None:
    line = sparkline(values)
    assert len(line) == len(values)
    drawn = [(v, BLOCKS.index(c)) for v, c in zip(values, line, strict=True) if c != "-"]
    assert len(drawn) == sum(v is not None and abs(v) < 2 for v in values)
    drawn.sort(key=lambda pair: pair[0])  # type: ignore[arg-type, return-value]
    heights = [height for _, height in drawn]
    assert heights == sorted(heights)
    if drawn and drawn[0][0] != drawn[-1][0]:
        assert (heights[0], heights[-1]) == (0, len(BLOCKS) - 1)


def test_what_was_not_measured_is_a_gap_and_equal_numbers_are_level() -> None:
    assert sparkline([0.0, None, 1.0]) == f"{BLOCKS[0]}-{BLOCKS[-1]}"
    assert sparkline([0.5, 0.5]) == BLOCKS[4] * 2
    assert sparkline([None, None]) == "--"


def test_every_block_has_a_character_of_ascii() -> None:
    assert in_ascii(BLOCKS) == "_.:;=+*#"
    assert in_ascii("\n".join(sparklines(View(sample.audit())))).isascii()


def test_each_scheme_has_a_line_with_its_lowest_and_highest_error() -> None:
    view = View(sample.audit())
    _, *lines = sparklines(view)
    assert [line.split()[0] for line in lines] == list(view.schemes)
    first, last = (view.score(s, "rtn-3bit") for s in ("stage1-step500", TRUNK_END))
    assert first is not None
    assert last is not None
    assert first.relative_error is not None
    assert last.relative_error is not None
    low, high = (percent(s.relative_error, bounds=False) for s in (first, last))
    assert lines[1].endswith(f"{low} to {high}")


TRUNK_END = "stage2-ingredient1-step1000"


def test_a_gap_stands_where_a_checkpoint_was_not_measured() -> None:
    audit = sample.audit()
    gone = ("stage1-step1000", "gptq-4bit")
    scores = tuple(s for s in audit.measurements if (s.subject, s.scheme) != gone)
    line = sparklines(View(replace(audit, measurements=scores)))[3].split()[1]
    assert (line[0], line[1]) == (BLOCKS[0], "-")


def test_a_long_series_fits_a_line() -> None:
    head, *lines = sparklines(View(sample.many(200, 3, name="x" * 90 + "{}")))
    assert all(len(line.split()[1]) == LONGEST_LINE for line in lines)
    assert all(width_of(line) <= 80 for line in lines)
    assert ".." in head
