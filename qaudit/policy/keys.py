"""The keys of a policy file, and what each may hold; the published schema is made of them.

YAML 1.1 reads a bare `off` as false, and pydantic reads a number as a date; both are undone here.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from qaudit.core.statistics import MINIMUM_DOCUMENTS
from qaudit.policy.margins import FORM
from qaudit.types import SELECTORS, Metric


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_level(value: object) -> object:
    """Undo what YAML makes of `off`."""
    return "off" if value is False else value


def _as_date(value: object) -> object:
    """Leave to pydantic only what is written as a day: it would take a number for seconds."""
    if isinstance(value, date) or (isinstance(value, str) and len(value) == len("2027-03-31")):
        return value
    raise ValueError("this is no date; write it as `2027-03-31`")


def _as_margin(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f"`{value}` has no unit; write `2%` or `0.01 nats`")
    return value


def _as_words(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError("there is nothing written; write it in words")
    return value


_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1),
    BeforeValidator(_as_list),
    WithJsonSchema(_TEXTS),
]
_Text = Annotated[str, Field(min_length=1), BeforeValidator(_as_words)]
_LEVELS: Any = ["off", "warn", "error", False]  # False is what YAML 1.1 reads for a bare `off`
_Level = Annotated[
    Literal["off", "warn", "error"],
    BeforeValidator(_as_level),
    WithJsonSchema({"enum": _LEVELS}),
]
_Margin = Annotated[
    str, BeforeValidator(_as_margin), WithJsonSchema({"type": "string", "pattern": FORM})
]


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RuleKeys(_Keys):
    """One rule; of an extended policy's rule, the keys to change."""

    name: Annotated[_Text, Field(description="Names the rule; unique.")]
    metric: Annotated[Metric | None, Field(description="What is measured.")] = None
    margin: Annotated[
        _Margin | None, Field(description="The most that passes: `2%` or `0.01 nats`.")
    ] = None
    level: Annotated[_Level | None, Field(description="The level of a breach.")] = None
    schemes: Annotated[_Texts | None, Field(description="Short forms, or globs.")] = None
    subjects: Annotated[
        _Texts | None, Field(description=f"Labels, globs, or {', '.join(SELECTORS)}.")
    ] = None


class IgnoreKeys(_Keys):
    """A breach that is accepted until a day."""

    rule: Annotated[_Text, Field(description="A rule's name, or a code such as QA001.")]
    reason: Annotated[_Text, Field(description="Why it is accepted, for readers of the report.")]
    until: Annotated[
        date, BeforeValidator(_as_date), Field(description="The last day on which it holds.")
    ]
    subject: Annotated[_Text, Field(description="A label or a glob.")] = "*"
    scheme: Annotated[_Text, Field(description="A short form or a glob.")] = "*"


class RequiredKeys(_Keys):
    """Measurements that must be present, whatever the rules."""

    schemes: Annotated[
        _Texts | None, Field(description="Of every gated subject, these schemes.")
    ] = None
    subjects: Annotated[_Texts | None, Field(description="At least one subject for each.")] = None


class PolicyKeys(_Keys):
    """The keys of a policy."""

    model_config = ConfigDict(extra="forbid", title="Policy of qaudit gate")

    name: Annotated[_Text | None, Field(description="Its name; by default that of its file.")] = (
        None
    )
    description: Annotated[str, Field(description="For people.")] = ""
    extends: Annotated[
        Literal["explore", "release", "strict"] | None, Field(description="A policy that ships.")
    ] = None
    minimum_documents: Annotated[
        int | None,
        Field(strict=True, ge=MINIMUM_DOCUMENTS, description="Below that there is no verdict."),
    ] = None
    confidence: Annotated[
        float | None,
        Field(gt=0.5, lt=1, description="With which all verdicts hold at once."),
    ] = None
    known: Annotated[
        Literal["error", "warn"] | None,
        BeforeValidator(_as_level),
        Field(description="The level of a breach that the baseline has, too."),
    ] = None
    required: Annotated[RequiredKeys | None, Field(description="Coverage.")] = None
    rules: Annotated[list[RuleKeys], Field(description="The rules.")] = []
    ignores: Annotated[list[IgnoreKeys], Field(description="Accepted breaches.")] = []
