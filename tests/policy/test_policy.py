"""Policies as files and on their page: what is read, what is refused by its line, what is true."""

import json
import re
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core import items, statistics
from qaudit.errors import PolicyError
from qaudit.judge.table import SUMS
from qaudit.judge.tasks import QUANTITIES
from qaudit.policy import PRESETS, policy_in, policy_named, preset, read_policy
from qaudit.policy.keys import (
    FILE,
    IgnoreKeys,
    PolicyKeys,
    RequiredKeys,
    RuleKeys,
    margin_of,
    schema_text,
)
from qaudit.types import (
    CODES,
    METRICS,
    SELECTORS,
    Ignore,
    Interval,
    Metric,
    Policy,
    PolicyRule,
    Tolerances,
)

SCHEMA = jsonschema.Draft202012Validator(json.loads(FILE.read_text(encoding="utf-8")))
WHOLE = """\
name: ours
description: What we ship.
minimum_documents: 50
confidence: 0.9
known: warn
required:
  schemes: [gptq-4bit, "awq-*"]
  subjects: "@pick"
rules:
  - name: four-bit
    metric: relative_error
    margin: 2%
    schemes: ["*-4bit", bnb-nf4]
    subjects: ["@pick", "step*"]
  - name: regression
    metric: loss_against_baseline
    margin: -0.01 nats
    level: warn
    schemes: fp
ignores:
  - rule: four-bit
    scheme: rtn-4bit
    reason: the reference, not what we ship
    until: 2027-03-31
"""


def written(tmp_path, text):
    path = tmp_path / "ours.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def read(tmp_path, text):
    return read_policy(written(tmp_path, text))


def one_rule(lines="", **changes):
    keys = {"name": "a", "metric": "relative_error", "margin": "2%", **changes}
    body = "\n".join(f"    {key}: {value}" for key, value in keys.items() if value)
    return f"rules:\n  -{body[3:]}\n{lines}"


# ----------------------------------------------------------------------- reading


def test_every_key_reaches_the_policy_with_the_line_it_stands_in(tmp_path):
    path = written(tmp_path, WHOLE)
    schemes, subjects = ("*-4bit", "bnb-nf4"), ("@pick", "step*")
    four = PolicyRule(
        "four-bit", "relative_error", 0.02, schemes=schemes, subjects=subjects, line=10
    )
    loss = PolicyRule("regression", "loss_against_baseline", -0.01, "warn", ("fp",), line=15)
    reason, until = "the reference, not what we ship", date(2027, 3, 31)
    assert read_policy(path) == Policy(
        name="ours",
        rules=(four, loss),
        ignores=(Ignore("four-bit", reason, until, scheme="rtn-4bit", line=21),),
        minimum_documents=50,
        required_schemes=("gptq-4bit", "awq-*"),
        required_subjects=("@pick",),
        confidence=0.9,
        known="warn",
        path=str(path),
        line_of_documents=3,
        line_of_required=6,
    )


def test_what_an_extended_policy_does_not_write_is_inherited(tmp_path):
    policy = read(tmp_path, "extends: release\nverify: {loss: 0.01 nats}\n")
    assert policy.verify == Tolerances(loss=0.01)
    assert preset("release").verify == Tolerances(plain=1e-6, loss=2e-3, kl=2e-3)
    assert [preset(name).required_answers for name in PRESETS] == ["off", "off", "warn"]
    assert read(tmp_path, "extends: strict\n").required_answers == "warn"
    answers = "extends: strict\nrequired: {answers: off}\n"
    assert read(tmp_path, answers).required_answers == "off"
    text = "extends: release\nrules:\n  - name: four-bit\n    margin: 3%\n"
    text += "  - name: more\n    metric: absolute_change\n    margin: 0.1 nats\n"
    found, whole = read(tmp_path, text), preset("release")
    four, three, more = (
        next(r for r in found.rules if r.name == name) for name in ("four-bit", "three-bit", "more")
    )
    assert (four.margin, four.line) == (0.03, 3)
    assert (four.bits, four.subjects, four.level) == (("4",), ("@ships",), "error")
    assert (three.margin, three.line) == (0.08, 1)
    assert more.metric == "absolute_change"
    assert found.minimum_documents == whole.minimum_documents
    assert found.name == "ours"


def test_schemes_are_kept_by_short_forms_and_off_is_read(tmp_path):
    found = read(tmp_path, one_rule(schemes="[gptq:bits=4, 'gptq-4bit:group=64']"))
    assert found.rules[0].schemes == ("gptq-4bit", "gptq-4bit:group=64")
    for level in ("off", '"off"', "no"):
        text = f"extends: release\nrules:\n  - name: four-bit\n    level: {level}\n"
        (rule,) = [r for r in read(tmp_path, text).rules if r.name == "four-bit"]
        assert rule.level == "off"


# ----------------------------------------------------------------------- refusing


NOT_A_DATE, NO_REASON = ("this is no date", "`2027-03-31`"), ("nothing written", "in words")
IGNORE = "extends: release\nignores:\n  - {%s}\n"


@pytest.mark.parametrize(
    ("text", "line", "said", "hint"),
    [
        ("ruls: []\n", 1, "there is no key `ruls`", "did you mean `rules`?"),
        (one_rule("    marginn: 3%\n"), 5, "no key `rules[0].marginn`", "`margin`?"),
        ("required:\n  scheme: x\n", 2, "no key `required.scheme`", "`schemes`?"),
        (one_rule(metric="relative_eror"), 3, "`relative_eror`", "`relative_error`?"),
        (one_rule(metric=""), 2, "`a` has no `metric`", "relative_error"),
        (one_rule(margin=""), 2, "`a` has no `margin`", "margin: 2%"),
        (one_rule(margin="0.02"), 4, "`0.02` has no unit", "`2%`"),
        (one_rule(margin="two"), 4, "`two` is no margin", "`2%`"),
        (one_rule(margin="2 nats"), 4, "no margin of `relative_error`", "a percentage: `2%`"),
        (one_rule(margin="-2%"), 4, "`-2%` is impossible", "between 0% and 1000%"),
        (one_rule(margin="1e9%"), 4, "`1e9%` is impossible", "between"),
        (one_rule(metric="absolute_change"), 4, "`2%` is no margin of `absolute_change`",
         "in nats per token: `0.01 nats`"),
        (one_rule(level="eror"), 5, "`rules[0].level` is `eror`", "did you mean `error`?"),
        (one_rule(schemes="[rtn-4bit, gptp-4bit]"), 5, "no scheme `gptp-4bit`", "`gptq-4bit`?"),
        (one_rule(schemes="['*-4bt']"), 5, "no scheme matches `*-4bt`", "-4bit"),
        (one_rule(schemes="gptq-9bit"), 5, "9 bits is out of range", "2 to 8"),
        (one_rule(schemes="fp"), 5, "compares a scheme with full precision", "name a scheme"),
        (one_rule(schemes="[]"), 5, "`rules[0].schemes` is", "longer list"),
        (one_rule(subjects="'@picks'"), 5, "there is no `@picks`", "did you mean `@pick`?"),
        (one_rule() + "  - {name: a, metric: relative_error, margin: 1%}\n", 5,
         "two rules are named `a`", "its own name"),
        (one_rule("    margin: 3%\n"), 5, "key `margin` is there twice", "check"),
        ("extends: releas\n", 1, "`extends` is `releas`", "did you mean `release`?"),
        ("minimum_documents: 3\nextends: release\n", 1, "is `3`", "10"),
        ("confidence: 95\nextends: release\n", 1, "is `95`", "less than 1"),
        ("known: off\nextends: release\n", 1, "`known` is `off`", "error, warn"),
        (IGNORE % "rule: for-bit, reason: x, until: 2027-01-01", 3,
         "no rule `for-bit`", "did you mean `four-bit`?"),
        (IGNORE % "rule: QA001, reason: x", 3, "`ignores[0].until`", ""),
        (IGNORE % "rule: QA001, until: 2027-01-01", 3, "`ignores[0].reason` is missing", "add it"),
        (IGNORE % 'rule: QA001, reason: "\\u3164 \\u200b.", until: 2027-01-01', 3, *NO_REASON),
        (IGNORE % "rule: QA001, reason: ' ', until: 2027-01-01", 3, *NO_REASON),
        (IGNORE % "rule: QA001, reason: x, until: 1800000000", 3, *NOT_A_DATE),
        (IGNORE % "rule: QA001, reason: x, until: 01.03.2027", 3, *NOT_A_DATE),
        ("extends: release\nclasses: {4: error, '4': off}\n", 2, "`4` is there twice", "keep one"),
        ("extends: release\nclasses: {4: error, 04: off}\n", 2, "key `4` is there twice",
         "check"),
        ("extends: strict\nrequired: {answers: error}\n", 2, "`required.answers` is `error`", ""),
        ("extends: release\na: 2027-02-30\n", 2, "`2027-02-30` is no date", "check"),
        ("extends: release\nrules: [{a: 1]\n", 2, "expected ',' or '}'", "brackets"),
        ("extends: release\n\tignores: []\n", 2, "a tab character", "indentation"),
        ("extends: release: x\n", 1, "mapping values", "quotes"),
        ("extends: release\nverify: {los: 1 nats}\n", 2, "no key `verify.los`", "`loss`?"),
        ("extends: release\nverify:\n  kl: 1%\n", 3, "`1%` is no margin of `kl`", "nats"),
        ("extends: release\nverify:\n  loss: -1 nats\n", 3, "is impossible", "between 0 nats"),
        ("rules: &all []\n", 1, "there is an anchor", "write it out"),
        # what is no policy at all
        ("", 0, "is not a policy", ""),
        ("- a\n", 0, "is not a policy", ""),
        ("just words\n", 0, "is not a policy", ""),
        ("rules: [\n", 2, "did not find expected node content", ""),
        ("? [a]\n: b\n", 1, "found unhashable key", ""),
        ("a: 1\n---\nb: 2\n", 2, "but found another document", ""),
        ("rules: !!python/object/apply:os.system [true]\n", 1, "could not determine", ""),
        ("rules: " + "[" * 9 + "]" * 9, 0, "`rules[0]` is `[[[[[[[[]]]]]]]]`", ""),
        ("[" * 5000, 1, "it nests deeper than 32 tables and lists", ""),
        ("a: \x00\n", 0, "is not YAML: unacceptable character", ""),
        ("#" * 1_000_001, 0, "has 1000001 characters", ""),
        ("description: nothing\n", 0, "it has no rules", ""),
        (one_rule(level="off"), 0, "every rule is `off`", ""),
        ("extends: explore\nrules:\n" + "".join(
            f"- {{name: r{k}, metric: relative_error, margin: 2%}}\n" for k in range(2000)
        ), 0, "`rules`: a policy has 2000 entries here", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line_and_what_was_meant(tmp_path, text, line, said, hint):
    with pytest.raises(PolicyError) as refused:
        read(tmp_path, text)
    assert not line or f"ours.yaml`, line {line}: " in refused.value.message
    assert said in refused.value.message
    assert hint in refused.value.hint
    assert refused.value.code == 2


def test_a_policy_that_is_no_text_or_not_there_is_refused(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_bytes(b"\xff\xfe\x00rules")
    with pytest.raises(PolicyError, match="cannot be read"):
        read_policy(path)
    hints = {"releas": "did you mean `release`?", "relase.yaml": "release", "x": ""}
    for name, hint in hints.items():
        with pytest.raises(PolicyError) as refused:
            policy_named(name)
        assert hint in refused.value.hint
        assert "a policy of your own is a .yaml file" in refused.value.hint


def test_margins_are_read_in_their_unit():
    margins = [
        ("2%", "relative_error", 0.02),
        (" .5 % ", "accuracy_drop", 0.005),
        ("0 nats", "soup_against_members", 0.0),
        ("1e-3 nats", "absolute_change", 0.001),
        ("-1 nat", "loss_against_baseline", -1.0),
        ("-0.5%", "error_against_baseline", -0.005),
    ]
    for text, metric, margin in margins:
        assert margin_of(text, metric) == pytest.approx(margin)


@given(st.text(max_size=8))
def test_any_text_is_a_margin_or_refused_in_words(text):
    try:
        assert 0.0 <= margin_of(text, "relative_error") <= 10.0
    except ValueError as error:
        assert text in str(error)


# ----------------------------------------------------------------------- presets and schema


def test_presets_are_valid_by_the_published_schema_described_and_grow_stricter():
    for name, path in PRESETS.items():
        # A number as a key is a text in JSON, and so it is to editors.
        table = json.loads(json.dumps(yaml.safe_load(path.read_text(encoding="utf-8"))))
        assert list(SCHEMA.iter_errors(table)) == []
        assert table["description"]
        assert preset(name).name == name
    margins = [{rule.name: rule.margin for rule in preset(name).rules} for name in PRESETS]
    for rule in ("four-bit", "three-bit"):
        found = [by_rule[rule] for by_rule in margins]
        assert found == sorted(found, reverse=True)
    assert not any(rule.level == "error" for rule in preset("explore").rules)


def test_the_published_schema_is_made_of_the_keys_and_tells_a_policy_from_what_is_none():
    assert FILE.read_text(encoding="utf-8") == schema_text(), "python -m qaudit.policy.keys"
    SCHEMA.check_schema(SCHEMA.schema)
    for text, valid in (
        (WHOLE, True),
        ("extends: release\nrules: [{name: four-bit, level: off}]\n", True),
        (one_rule(margin="0.02"), False),
        (one_rule(margin="2"), False),
        (one_rule(level="maybe"), False),
        ("ruls: []\n", False),
    ):
        table = json.loads(json.dumps(yaml.safe_load(text), default=str))
        assert SCHEMA.is_valid(table) == valid


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language, page=PAGE):
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def rows():
    """Return every row of every table by its first cell."""
    found = re.findall(r"^\| (`?[^|]+?`?) \| (.+) \|$", PAGE, flags=re.MULTILINE)
    return {first: [cell.strip() for cell in rest.split(" | ")] for first, rest in found}


def test_every_example_is_a_policy_and_the_first_does_what_its_comments_say():
    schema = jsonschema.Draft202012Validator(json.loads(FILE.read_text(encoding="utf-8")))
    for text in (*blocks("yaml"), *blocks("yaml", README)):
        assert policy_in(text, where="the page", name="page", path=None).rules
        table = json.loads(json.dumps(yaml.safe_load(text), default=str))
        assert list(schema.iter_errors(table)) == []
    found = policy_in(blocks("yaml")[0], where="the page", name="page", path=None)
    levels = {rule.name: (rule.level, rule.margin) for rule in found.rules}
    assert levels["four-bit"] == ("error", 0.015)
    assert levels["three-bit"][0] == "off"
    assert found.ignores[0].scheme == "bnb-nf4"

    (code,) = blocks("python")  # the figures of the scaling law are computed
    exec(code, {})


def test_every_key_tolerance_metric_and_selector_has_a_row_that_is_true():
    told = rows()
    for keys in (PolicyKeys, RequiredKeys, RuleKeys, IgnoreKeys):
        assert {f"`{name}`" for name in keys.model_fields} <= set(told)
    for name, default in asdict(preset("release").verify).items():
        assert told[f"`verify.{name}`"][-1] == f"`{default:g} nats`".replace("1e-06", "1e-6")
    for metric, record in METRICS.items():
        unit = "`%`" if record.unit == "fraction" else f"`{record.unit}`"
        assert told[f"`{metric}`"][1:] == [unit, record.code]
    assert {f"`{name}`" for name in SELECTORS} <= set(told)


def test_the_table_of_presets_has_their_margins():
    for width in ("eight", "four", "three"):
        for preset_name, cell in zip(PRESETS, rows()[f"{width} bits"], strict=True):
            (found,) = [r for r in preset(preset_name).rules if r.name == f"{width}-bit"]
            warns = ", warns" if found.level == "warn" else ""
            assert cell == f"{100 * found.margin:g} %{warns}"
    assert rows()["documents"] == [str(preset(name).minimum_documents) for name in PRESETS]


def test_every_metric_has_a_record_and_a_code_of_its_own():
    assert get_args(Metric) == tuple(METRICS)
    assert len({record.code for record in METRICS.values()}) == len(METRICS)
    assert {record.code for record in METRICS.values()} <= set(CODES)
    assert list(CODES) == sorted(CODES)


@pytest.mark.parametrize("name", METRICS)
def test_a_record_names_statistics_that_exist(name):
    record = METRICS[name]
    if record.of_rollouts:
        assert record.statistic in QUANTITIES
    else:
        assert record.of_tasks or record.sums in SUMS
        assert callable(getattr(items if record.of_tasks else statistics, record.statistic))
    assert record.worse is None or callable(getattr(statistics, record.worse))
    assert bool(record.compared) == (record.of_fidelity or record.of_rollouts)
    text = record.sentence.format(scheme="s", subject="a", against="b", change="1")
    assert ("`b`" in text) == (record.against is not None)


def test_a_margin_is_the_most_or_the_least():
    most, least = METRICS["kl"], METRICS["tokens_to_divergence"]
    inside, around, beyond = Interval(3, 2, 4), Interval(5, 4, 6), Interval(8, 7, 9)
    assert most.reaches(inside, 5) == least.reaches(beyond, 5) == (True, False)
    assert most.reaches(around, 5) == least.reaches(around, 5) == (False, False)
    assert most.reaches(beyond, 5) == least.reaches(inside, 5) == (False, True)
