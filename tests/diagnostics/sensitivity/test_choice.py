"""Which parts are measured, how parameters are written, and what is said of a role."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qaudit.diagnostics.diagnostic import diagnostics, parse_diagnostics
from qaudit.diagnostics.sensitivity import Variant, judge, variants_of
from qaudit.errors import SchemeError
from qaudit.judge.table import Measurements
from qaudit.types import Diagnostics, Interval, SensitivityRow
from tests.support.diagnosed import ALL, ROLE

ROLES = ("q", "o", "down")


def test_every_role_and_every_block_is_in_exactly_one_part_of_its_kind() -> None:
    variants = variants_of(ROLES, 10, 3, 4, 4)
    for bits in (3, 4):
        alone = [v for v in variants if v.part == "role" and v.bits[0][1] == bits]
        assert [v.name for v in alone] == list(ROLES)
    groups = [v for v in variants if v.part == "layers"]
    assert len(groups) == 4
    for block in range(10):
        assert [v.bits_of(block, "mlp.down_proj") for v in groups].count(3) == 1
    assert {v.bits_of(7, "self_attn.q_proj") for v in variants if v.part == "all"} == {3, 4}


def test_a_part_leaves_all_others_as_they_are() -> None:
    only = Variant("role", "q", (("q", 3),))
    assert only.bits_of(0, "self_attn.q_proj") == 3
    assert only.bits_of(0, "self_attn.k_proj") is None
    assert Variant("layers", "0..1", (("q", 3),), (0, 2)).bits_of(2, "self_attn.q_proj") is None


def test_few_blocks_make_few_groups_and_none_can_be_asked_for() -> None:
    assert sum(v.part == "layers" for v in variants_of(ROLES, 2, 3, 4, 4)) == 2
    assert sum(v.part == "layers" for v in variants_of(ROLES, 2, 3, 4, 0)) == 0


@pytest.mark.parametrize("name", diagnostics())
def test_a_diagnostic_reads_back_from_what_it_prints(name: str) -> None:
    plain = diagnostics()[name]()
    assert parse_diagnostics([plain.spec]) == parse_diagnostics([plain.short]) == (plain,)
    assert plain.short == name


def test_a_scheme_in_full_stands_last_and_keeps_its_parameters() -> None:
    (asked,) = parse_diagnostics(["sensitivity:layers=8:scheme=gptq:bits=3:group=64"])
    assert asked.short == "sensitivity:layers=8:scheme=gptq:bits=3:group=64"
    assert parse_diagnostics([asked.spec]) == (asked,)


def test_all_stands_for_each_and_what_is_said_of_one_holds() -> None:
    asked = {one.name: one for one in parse_diagnostics(["all", "weights:group=64"])}
    assert list(asked) == list(diagnostics())
    assert asked["weights"].short == "weights:group=64"
    assert parse_diagnostics(["weights:group=64,all"])[0] in asked.values()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kurtosis", "there is no diagnostic `kurtosis`"),
        ("weights:groups=3", "`weights` has no parameter `groups`"),
        ("weights:group=64,weights:group=32", "`weights` is requested twice"),
    ],
)
def test_what_no_diagnostic_knows_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(SchemeError, match=sentence):
        parse_diagnostics([text])


FOUR = (replace(ALL, bits=4), replace(ROLE, bits=4))


@pytest.mark.parametrize(
    ("rows", "rules"),
    [
        ([ROLE], ["QA035"]),
        ([replace(ROLE, share=Interval(0.6, 0.49, 0.7))], []),  # not all of the interval
        ([replace(ROLE, share=None)], []),
        (FOUR, []),  # said at the fewer bits alone
        ([*FOUR, ROLE], ["QA035"]),
        ([replace(ROLE, part="layers", name="0..1")], []),
    ],
)
def test_a_role_adds_most_only_with_all_of_its_interval(
    rows: list[SensitivityRow], rules: list[str]
) -> None:
    _, findings = judge(Measurements((), (), 0.95), Diagnostics(sensitivity=(ALL, *rows)))
    assert [finding.rule for finding in findings] == rules
