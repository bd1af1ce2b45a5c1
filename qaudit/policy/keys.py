"""The keys of a policy file, and what each may hold; the published schema is made of them.

    python -m qaudit.policy.keys

writes `policy.schema.json` beside this file; a test holds it equal.

YAML 1.1 reads a bare `off` as false, and pydantic reads a number as a date; both are undone here.
Margins are texts with the unit of what they bound, `2%` or `0.01 nats`: a bare 0.02 is two percent
to one reader and 0.02 nats to the other.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from qaudit.core.scheme import BIT_CLASS
from qaudit.core.statistics import MINIMUM_DOCUMENTS
from qaudit.support.keys import as_list
from qaudit.types import METRICS, SELECTORS, Metric, Unit

_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
FORM = rf"^\s*{_NUMBER}\s*(%|nats?|tokens?)\s*$"
"""What a margin looks like, for the published schema."""

_MARGIN = re.compile(rf"\s*(?P<number>{_NUMBER})\s*(?P<unit>%|nats?|tokens?|)\s*", re.ASCII)
_EXAMPLE: dict[Unit, str] = {"fraction": "2%", "nats": "0.01 nats", "tokens": "100 tokens"}
_NAMED: dict[Unit, str] = {
    "fraction": "a percentage",
    "nats": "in nats per token",
    "tokens": "a number of tokens",
}
# Ten times the loss, or ten nats per token: beyond that nothing is left of a model.
_MOST: dict[Unit, float] = {"fraction": 10.0, "nats": 10.0, "tokens": 1e6}


def _as_level(value: object) -> object:
    return "off" if value is False else value


def _as_date(value: object) -> object:
    """Leave to pydantic only what is written as a day: it would take a number for seconds."""
    if isinstance(value, date):
        return value
    with suppress(ValueError):
        if isinstance(value, str) and date.fromisoformat(value).isoformat() == value:
            return value
    raise ValueError("this is no date; write it as `2027-03-31`")


def _as_margin(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f"`{value}` has no unit; write `2%` or `0.01 nats`")
    return value


def _as_bits(value: object) -> object:
    """Write classes of bits, which YAML reads as numbers, as texts."""
    if isinstance(value, dict):
        named = {str(key): level for key, level in value.items()}
        if len(named) < len(value):
            twice = next(key for key in value if isinstance(key, str) and key.isdecimal())
            raise ValueError(f"`{twice}` is there twice; keep one of them")
        return named
    items = value if isinstance(value, list) else [value]
    return [str(item) for item in items]


def _as_words(value: object) -> object:
    unseen = "\u115f\u1160\u3164\uffa0"
    if isinstance(value, str) and not any(c.isalnum() and c not in unseen for c in value):
        raise ValueError("there is nothing written; write it in words")
    return value


_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1),
    BeforeValidator(as_list),
    WithJsonSchema(_TEXTS),
]
_Text = Annotated[str, Field(min_length=1), BeforeValidator(_as_words)]
_LEVELS: Any = ["off", "warn", "error", False]  # False is what YAML 1.1 reads for a bare `off`
_Level = Annotated[
    Literal["off", "warn", "error"], BeforeValidator(_as_level), WithJsonSchema({"enum": _LEVELS})
]
_BITS = f"^({BIT_CLASS})$"
_CLASS_IN_YAML: Any = {
    "anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "string", "pattern": _BITS}]
}
_Class = Annotated[str, Field(pattern=_BITS)]
_Classes = Annotated[
    list[_Class],
    Field(min_length=1),
    BeforeValidator(_as_bits),
    WithJsonSchema({"anyOf": [_CLASS_IN_YAML, {"type": "array", "items": _CLASS_IN_YAML}]}),
]
_LevelOfClass = Annotated[
    dict[_Class, _Level],
    BeforeValidator(_as_bits),
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {_BITS: {"enum": _LEVELS}},
            "additionalProperties": False,
        }
    ),
]
_Margin = Annotated[
    str, BeforeValidator(_as_margin), WithJsonSchema({"type": "string", "pattern": FORM})
]


_Worst = Literal["worst"] | None
_Preset = Literal["explore", "release", "strict"] | None
_Known = Annotated[Literal["error", "warn"] | None, BeforeValidator(_as_level)]
_Answers = Annotated[
    Literal["off", "warn"] | None,
    BeforeValidator(_as_level),
    WithJsonSchema({"enum": ["off", "warn", False]}),
]
_Date = Annotated[date, BeforeValidator(_as_date)]


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RuleKeys(_Keys):
    """One rule; of an extended policy's rule, the keys to change."""

    name: _Text = Field(description="Names the rule; unique.")
    metric: Metric | None = Field(None, description="What is measured.")
    margin: _Margin | None = Field(None, description="The most that passes: `2%` or `0.01 nats`.")
    level: _Level | None = Field(None, description="The level of a breach.")
    schemes: _Texts | None = Field(None, description="Short forms, or globs.")
    subjects: _Texts | None = Field(None, description=f"Labels, globs, or {', '.join(SELECTORS)}.")
    bits: _Classes | None = Field(None, description="Only schemes of so many bits: 4, or [4, 3].")
    strata: _Worst = Field(None, description="The worst group of documents decides.")
    tasks: _Worst = Field(None, description="The worst task decides, not their mean.")


class IgnoreKeys(_Keys):
    """A breach that is accepted until a day."""

    rule: _Text = Field(description="A rule's name, or a code such as QA001.")
    reason: _Text = Field(description="Why it is accepted, for readers of the report.")
    until: _Date = Field(description="The last day on which it holds.")
    subject: _Text = Field("*", description="A label or a glob.")
    scheme: _Text = Field("*", description="A short form or a glob.")


class RequiredKeys(_Keys):
    """Measurements that must be present, whatever the rules."""

    schemes: _Texts | None = Field(None, description="Of every gated subject, these schemes.")
    subjects: _Texts | None = Field(None, description="At least one subject for each.")
    answers: _Answers = Field(
        None,
        description="Tasks or rollouts of a chat model, where KL divergence ranks nothing.",
    )


class VerifyKeys(_Keys):
    """How far `qaudit verify` lets a file run from what was audited, in nats per token."""

    plain: _Margin | None = Field(
        None, description="Loss and KL, with torch's own products: `1e-6 nats`."
    )
    loss: _Margin | None = Field(None, description="Of the loss, with other kernels.")
    kl: _Margin | None = Field(None, description="Of the KL divergence, with other kernels.")
    narrow: _Margin | None = Field(
        None, description="Loss and KL, measured in float32 and run in bfloat16."
    )
    activations: _Margin | None = Field(
        None, description="Loss and KL, where a runtime rounds activations."
    )


class PolicyKeys(_Keys):
    """The keys of a policy."""

    model_config = ConfigDict(extra="forbid", title="Policy of qaudit gate")

    name: _Text | None = Field(None, description="Its name; by default that of its file.")
    description: str = Field("", description="For people.")
    extends: _Preset = Field(None, description="A policy that ships.")
    minimum_documents: int | None = Field(
        None, strict=True, ge=MINIMUM_DOCUMENTS, description="Below that there is no verdict."
    )
    confidence: float | None = Field(
        None, gt=0.5, lt=1, description="With which all verdicts hold at once."
    )
    known: _Known = Field(None, description="The level of a breach that the baseline has, too.")
    classes: _LevelOfClass | None = Field(
        None, description="What ships, by its bits, and its level."
    )
    required: RequiredKeys | None = Field(None, description="Coverage.")
    verify: VerifyKeys | None = Field(None, description="Tolerances of exported files.")
    rules: list[RuleKeys] = Field([], description="The rules.")
    ignores: list[IgnoreKeys] = Field([], description="Accepted breaches.")


def margin_of(text: str, metric: Metric) -> float:
    """Return a margin as a fraction or in nats per token; ValueError names what is wrong."""
    unit = METRICS[metric].unit
    example = _EXAMPLE[unit]
    match = _MARGIN.fullmatch(text)
    if match is None:
        raise ValueError(f"`{text}` is no margin; write it as `{example}`")
    if not match["unit"]:
        raise ValueError(f"`{text}` has no unit; write it as `{example}`")
    if match["unit"].rstrip("s") != {"fraction": "%"}.get(unit, unit.rstrip("s")):
        raise ValueError(f"`{text}` is no margin of `{metric}`; it is {_NAMED[unit]}: `{example}`")
    value, most = float(match["number"]) / (100 if unit == "fraction" else 1), _MOST[unit]
    # Against something else a margin below zero requires an improvement.
    least = -most if METRICS[metric].against else 0.0
    if not least <= value <= most:
        bounds = " and ".join(
            f"{100 * bound:g}%" if unit == "fraction" else f"{bound:g} {unit}"
            for bound in (least, most)
        )
        raise ValueError(f"a margin of `{text}` is impossible; it must be between {bounds}")
    return value


FILE = Path(__file__).with_name("policy.schema.json")


def schema_text() -> str:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **PolicyKeys.model_json_schema(),
    }
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
