"""Read policies: YAML in, `Policy` out; a wrong one is refused with its line and the nearest key.

`keys` declares the keys and their schema, and `presets/` has the policies that ship. A policy that
`extends` another starts from it: a rule of the same name changes the keys that it has and keeps the
others, and any other key replaces the inherited one. Only policies that ship can be extended, so
that a policy never depends on a second file that may change unseen. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError

from qaudit.core.registry import parse_scheme, schemes, short_forms, split_bits
from qaudit.errors import PolicyError, SchemeError
from qaudit.policy.keys import IgnoreKeys, PolicyKeys, RequiredKeys, RuleKeys, VerifyKeys, margin_of
from qaudit.support.foreign import Place, lines_of, nearest_line, yaml_and_nodes
from qaudit.support.keys import dotted, explain, first, nearest
from qaudit.types import FULL_PRECISION, METRICS, SELECTORS, Ignore, Metric, Policy, PolicyRule
from qaudit.whole import read_regular

PRESETS: Mapping[str, Traversable] = {
    name: files("qaudit.policy") / "presets" / f"{name}.yaml"
    for name in ("explore", "release", "strict")
}
"""The policies that ship, from the mildest."""

CODES = (*(metric.code for metric in METRICS.values()), "QA025", "QA026", "QA040")
"""Rules that an ignore may name by their code."""

_MOST_ENTRIES = 200
"""Rules, and ignores; each rule is judged for every subject and scheme."""

_COMPUTED = {
    "strata": ("stratum", sorted(name for name, metric in METRICS.items() if metric.by_stratum)),
    "tasks": ("task", sorted(name for name, metric in METRICS.items() if metric.of_tasks)),
}

_ALLOWED = {
    "": list(PolicyKeys.model_fields),
    "rules": list(RuleKeys.model_fields),
    "ignores": list(IgnoreKeys.model_fields),
    "required": list(RequiredKeys.model_fields),
    "verify": list(VerifyKeys.model_fields),
}


def policy_in(text: str, *, where: str, name: str, path: str | None) -> Policy:
    """Return the policy in a text; `where` names it in messages, `name` is its default name."""
    file = _File(where, *read_table(text, where))
    keys = file.keys()
    for key, written in (("rules", keys.rules), ("ignores", keys.ignores)):
        if len(written) > _MOST_ENTRIES:
            sentence = f"a policy has {len(written)} entries here"
            file.refuse((key,), sentence, f"at most {_MOST_ENTRIES}: use globs of subjects")
    start = preset(keys.extends) if keys.extends else Policy(name=name, rules=())
    line = file.line(("extends",))
    inherited = {rule.name: replace(rule, line=line) for rule in start.rules}
    rules = inherited | {rule.name: rule for rule in file.rules(keys.rules, inherited)}
    required = keys.required or RequiredKeys.model_validate({})
    texts = keys.verify.model_dump(exclude_none=True) if keys.verify else {}
    bounds = {key: file.bound(text, "kl", ("verify", key)) for key, text in texts.items()}
    changes = keys.model_dump(include={"minimum_documents", "confidence", "known"})
    ignores = tuple(file.ignores(keys.ignores, list(rules)))
    changes |= {
        "required_schemes": file.schemes(required.schemes, ("required", "schemes"), None),
        "required_subjects": file.subjects(required.subjects, ("required", "subjects")),
        "required_answers": required.answers,
    }
    policy = replace(
        start,
        name=keys.name or name,
        rules=tuple(rules.values()),
        ignores=ignores,
        path=path,
        line_of_documents=file.line(("minimum_documents",)),
        line_of_required=file.line(("required",)),
        classes={**start.classes, **(keys.classes or {})},
        verify=replace(start.verify, **bounds),
        line_of_classes=file.line(("classes",)),
        **{key: value for key, value in changes.items() if value is not None},
    )
    if not (policy.required_schemes or policy.required_subjects):
        if not policy.rules:
            file.refuse((), "it has no rules", "write `rules`, or `extends: release`")
        if all(rule.level == "off" for rule in policy.rules):
            file.refuse((), "every rule is `off`", "give at least one the level `warn` or `error`")
    return policy


@cache
def preset(name: str) -> Policy:
    text = PRESETS[name].read_text(encoding="utf-8")
    return policy_in(text, where=f"policy `{name}`", name=name, path=None)


_YAML_HINT = "check the indentation, quotes and brackets of that line and of the one above"


def read_table(text: str, where: str) -> tuple[dict[str, Any], dict[Place, int]]:
    """Read one YAML document that is a table; return it and the line of every key and item."""
    try:
        table, node = yaml_and_nodes(text)
    except ValueError as error:
        reason = str(error)
        wrong = f", {reason}" if reason.startswith("line ") else f" is not YAML: {reason}"
        raise PolicyError(f"{where}{wrong}", hint=_YAML_HINT) from error
    if not isinstance(table, dict) or not isinstance(node, yaml.MappingNode):
        raise PolicyError(
            f"{where} is not a policy", hint="a policy is a table of keys, `rules` among them"
        )
    # Other YAML files may have anchors.
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if getattr(event, "anchor", None) and event.start_mark:
            line = f"line {event.start_mark.line + 1}"
            raise PolicyError(f"{where}, {line}: there is an anchor", hint="write it out")
    return table, lines_of(node)


@dataclass(frozen=True)
class _File:
    """The table of a policy file, and its errors by line."""

    where: str
    table: dict[str, Any]
    lines: dict[Place, int]

    def line(self, place: Place) -> int:
        return nearest_line(self.lines, place)

    def refuse(self, place: Place, sentence: str, hint: str) -> NoReturn:
        """Raise an error that names the file, the line and the key."""
        key = f"`{dotted(place)}`: " if place else ""
        line = f", line {self.line(place)}" if place else ""
        raise PolicyError(f"{self.where}{line}: {key}{sentence}", hint=hint)

    def keys(self) -> PolicyKeys:
        try:
            return PolicyKeys.model_validate(self.table)
        except ValidationError as error:
            wrong = first(error.errors())
            sentence, hint = explain([wrong], _ALLOWED)
            if wrong["type"] == "literal_error":  # for a word that is none of several, the nearest
                names = re.findall(r"'([^']*)'", str(wrong["ctx"]["expected"]))
                word = str(wrong["input"])
                sentence, hint = f"`{dotted(wrong['loc'])}` is `{word}`", nearest(word, names)
            line = self.line(tuple(wrong["loc"]))
            raise PolicyError(f"{self.where}, line {line}: {sentence}", hint=hint) from error

    def rules(
        self, written: Sequence[RuleKeys], inherited: Mapping[str, PolicyRule]
    ) -> Iterator[PolicyRule]:
        """Yield the rules that are written, each with what it takes from an inherited one."""
        names = [keys.name for keys in written]
        for k, keys in enumerate(written):
            if keys.name in names[:k]:
                sentence = f"two rules are named `{keys.name}`"
                self.refuse(("rules", k, "name"), sentence, "give each its own name")
            yield self._rule(keys, inherited.get(keys.name), ("rules", k))

    def _rule(self, keys: RuleKeys, before: PolicyRule | None, place: Place) -> PolicyRule:
        metric = keys.metric or (before.metric if before else None)
        if metric is None:
            self.refuse(place, f"`{keys.name}` has no `metric`", nearest("", METRICS))
        margin = before.margin if before and before.metric == metric else None
        if keys.margin is not None:
            margin = self.bound(keys.margin, metric, (*place, "margin"))
        if margin is None:
            self.refuse(place, f"`{keys.name}` has no `margin`", "for example `margin: 2%`")
        changes = keys.model_dump(include={"level", "strata", "tasks"}) | {
            "metric": metric,
            "margin": margin,
            "schemes": self.schemes(keys.schemes, (*place, "schemes"), metric),
            "subjects": self.subjects(keys.subjects, (*place, "subjects")),
            "bits": tuple(keys.bits) if keys.bits else None,
            "line": self.line(place),
        }
        for key, (by, names) in _COMPUTED.items():
            if changes[key] is not None and metric not in names:
                sentence = f"`{metric}` is not computed by {by}"
                self.refuse((*place, key), sentence, f"one of {', '.join(names)}")
        changes = {key: value for key, value in changes.items() if value is not None}
        return replace(before or PolicyRule(keys.name, metric, margin), **changes)

    def bound(self, written: str, metric: Metric, place: Place) -> float:
        try:
            return margin_of(written, metric)
        except ValueError as error:
            sentence, _, hint = str(error).partition("; ")
            self.refuse(place, sentence, hint)

    def schemes(
        self, written: Sequence[str] | None, place: Place, metric: Metric | None
    ) -> tuple[str, ...] | None:
        """Return schemes by their short forms, and globs that some scheme matches."""
        if written is None:
            return None
        return tuple(self._scheme(text, (*place, k), metric) for k, text in enumerate(written))

    def _scheme(self, text: str, place: Place, metric: Metric | None) -> str:
        if any(sign in text for sign in "*?["):
            names = short_forms(range(2, 9))
            if not any(fnmatchcase(form, text.partition(":")[0]) for form in names):
                self.refuse(place, f"no scheme matches `{text}`", nearest(text, names))
            return text
        if text == FULL_PRECISION:
            if metric is not None and not METRICS[metric].has_full_precision:
                sentence = f"`{metric}` compares a scheme with full precision, and `{text}` is that"
                self.refuse(place, sentence, "name a scheme")
            return text
        if split_bits(text.partition(":")[0])[0] in schemes().entries:
            return text  # of another distribution, which is not imported to judge
        try:
            return parse_scheme(text).short
        except SchemeError as error:
            self.refuse(place, error.message, error.hint)

    def subjects(self, written: Sequence[str] | None, place: Place) -> tuple[str, ...] | None:
        for k, text in enumerate(written or ()):
            if text.startswith("@") and text not in SELECTORS:
                self.refuse((*place, k), f"there is no `{text}`", nearest(text, SELECTORS))
        return None if written is None else tuple(written)

    def ignores(self, written: Sequence[IgnoreKeys], rules: Sequence[str]) -> Iterator[Ignore]:
        for k, keys in enumerate(written):
            place: Place = ("ignores", k, "rule")
            if keys.rule not in (names := [*rules, *CODES]):
                sentence = f"there is no rule `{keys.rule}`"
                self.refuse(place, sentence, nearest(keys.rule, names))
            more = {"reason": keys.reason.strip(), "line": self.line(place[:2])}
            yield Ignore(**keys.model_dump() | more)


__all__ = ["PRESETS", "descriptions", "policy_inside", "policy_named", "preset", "read_policy"]

_ENDINGS = (".yaml", ".yml")


def descriptions() -> dict[str, str]:
    texts = {name: path.read_text(encoding="utf-8") for name, path in PRESETS.items()}
    tables = {name: read_table(text, f"policy `{name}`")[0] for name, text in texts.items()}
    return {name: str(table["description"]) for name, table in tables.items()}


def read_policy(path: Path) -> Policy:
    try:
        text = read_regular(path).decode()
    except FileNotFoundError as error:
        raise PolicyError(f"there is no policy `{path}`", hint=_instead(path.stem)) from error
    except (OSError, UnicodeDecodeError) as error:
        if path.is_dir():
            raise PolicyError(
                f"`{path}` is a folder, and a policy is a file", hint=_instead(path.stem)
            ) from error
        reason = " ".join(str(error).split())
        raise PolicyError(f"`{path}` cannot be read: {reason}", hint="write it as YAML") from error
    return policy_in(text, where=f"`{path}`", name=path.stem, path=str(path))


def policy_named(text: str) -> Policy:
    """Return a policy by its file, or by the name of one that ships."""
    if text in PRESETS and not Path(text).is_file():
        return preset(text)
    if text.endswith(_ENDINGS) or Path(text).exists():
        return read_policy(Path(text))
    raise PolicyError(f"there is no policy `{text}`", hint=_instead(text))


def policy_inside(text: str, folder: Path) -> Policy:
    """Return a policy that the audit in a folder names: one that ships, or a file in the folder.

    An audit of others may name any path; nothing outside its folder is opened.
    """
    if text in PRESETS:
        return preset(text)
    path = (folder / text).resolve()
    if path.is_relative_to(folder.resolve()) and path.is_file():
        return read_policy(path)
    raise PolicyError(
        f"its policy `{text}` is neither one that ships nor a file in its folder",
        hint=f"copy the policy into the folder of the audit, or scan with {', '.join(PRESETS)}",
    )


def _instead(name: str) -> str:
    return f"{nearest(name, PRESETS)} a policy of your own is a .yaml file".replace(
        f"{', '.join(PRESETS)} a", f"{', '.join(PRESETS)}; a"
    )
