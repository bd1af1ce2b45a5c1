"""The page about policies: its examples are policies, its figures computed, its keys all keys."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import jsonschema
import yaml

from qaudit.policy import PRESETS, policy_in, preset
from qaudit.policy.keys import FILE, IgnoreKeys, PolicyKeys, RequiredKeys, RuleKeys
from qaudit.types import METRICS, SELECTORS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def rows() -> dict[str, list[str]]:
    """Return every row of every table by its first cell."""
    found = re.findall(r"^\| (`?[^|]+?`?) \| (.+) \|$", PAGE, flags=re.MULTILINE)
    return {first: [cell.strip() for cell in rest.split(" | ")] for first, rest in found}


def test_every_example_is_a_policy_and_the_first_does_what_its_comments_say() -> None:
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


def test_every_key_tolerance_metric_and_selector_has_a_row_that_is_true() -> None:
    told = rows()
    for keys in (PolicyKeys, RequiredKeys, RuleKeys, IgnoreKeys):
        assert {f"`{name}`" for name in keys.model_fields} <= set(told)
    for name, default in asdict(preset("release").verify).items():
        assert told[f"`verify.{name}`"][-1] == f"`{default:g} nats`".replace("1e-06", "1e-6")
    for metric, record in METRICS.items():
        unit = "`%`" if record.unit == "fraction" else f"`{record.unit}`"
        assert told[f"`{metric}`"][1:] == [unit, record.code]
    assert {f"`{name}`" for name in SELECTORS} <= set(told)


def test_the_table_of_presets_has_their_margins() -> None:
    for width in ("eight", "four", "three"):
        for preset_name, cell in zip(PRESETS, rows()[f"{width} bits"], strict=True):
            (found,) = [r for r in preset(preset_name).rules if r.name == f"{width}-bit"]
            warns = ", warns" if found.level == "warn" else ""
            assert cell == f"{100 * found.margin:g} %{warns}"
    assert rows()["documents"] == [str(preset(name).minimum_documents) for name in PRESETS]
