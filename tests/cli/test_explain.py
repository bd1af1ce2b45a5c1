"""`qaudit explain`: rules, findings, metrics and schemes by their names."""

from __future__ import annotations

import pytest

from tests.support.cli import Run, refused


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("four-bit-tail", ("a rule about kl_p999", "1 nat in release (warn)", "(QA038)")),
        ("qa029", ("QA029: one document carries much of the added loss",)),
        ("kl", ("kl (QA037)", "What to do: ship another subject or scheme")),
        ("gptq-4bit", ("gptq:bits=4", "Round columns in turn")),
    ],
)
def test_a_name_is_explained(qaudit: Run, name: str, words: tuple[str, ...]) -> None:
    done = qaudit("explain", name)
    assert done.code == 0
    assert all(text in " ".join(done.out.split()) for text in words)
    assert max(map(len, done.out.splitlines())) <= 80 or ":" in done.out


def test_what_nothing_is_called_is_refused_with_what_is_near(qaudit: Run) -> None:
    refused(qaudit("explain", "four-bit-tails"), 2, "nothing is called", "four-bit-tail")
