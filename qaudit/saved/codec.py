"""Frozen values to JSON and back, by their type hints: the one codec of everything that is saved.

Pydantic does the work on the plain dataclasses of `qaudit.types`. Reading is strict: a number is
no text, a text no number, and what is wrong is named by its path. Keys without a field are
ignored, so that what a later version of the same schema adds can be read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from qaudit.errors import AuditError
from qaudit.support.foreign import json_of
from qaudit.support.keys import explain
from qaudit.whole import read_regular, write_whole

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

EDITED = "the audit may be damaged or edited by hand: run the same scan again"

SCHEMA = "1"
"""The version of every document; within one version names are only added."""

FILE = "audit.json"
LARGEST_NBYTES = 256 * 2**20
"""Of an audit: a thousand subjects under eight schemes take about ten megabytes."""

LARGEST_INTEGER = 2**63 - 1
"""Of a saved document: what every reader of JSON and every table can hold."""


def encode(value: Any) -> dict[str, Any]:
    document: dict[str, Any] = _adapter(type(value)).dump_python(value, mode="json")
    return document


def text_of(document: Any) -> str:
    """Write a JSON document, each row of its tables on a line; NaN and infinity are null."""
    document = _finite(document)
    if not isinstance(document, dict):
        return json.dumps(document, indent=1, allow_nan=False) + "\n"
    texts = []
    for key, value in document.items():
        text = json.dumps(value, indent=1, allow_nan=False).replace("\n", "\n ")
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            text = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in value)
            text = f"[\n{text}\n ]"
        texts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(texts) + "\n}\n"


def write(path: Path, value: Any) -> None:
    """Write a value as a JSON document that is there whole or not at all."""
    write_whole(path, text_of(encode(value)))


def decode(kind: type[T], document: Any, where: str) -> T:
    """Return a JSON document as a dataclass; AuditError names what is wrong by its path."""
    from pydantic import ValidationError

    try:
        text = json.dumps(document, allow_nan=False)
        value: T = _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        sentence, expected = explain([{**first, "loc": (where, *first["loc"])}], {})
        raise AuditError(f"{sentence}; {expected}", hint=EDITED) from error
    except (ValueError, RecursionError) as error:
        raise AuditError(f"`{where}` cannot be read: {error}", hint=EDITED) from error
    return value


def refuse_other_schema(document: dict[str, Any], what: str, otherwise: str) -> None:
    """Refuse a document of another version of its schema, with what else can be done."""
    version = str(document.get("schema"))[:20]
    if version == SCHEMA:
        return
    if not version.isdecimal() or int(version) < int(SCHEMA):
        raise AuditError(f"{what} has the unknown schema version `{version}`", hint=otherwise)
    raise AuditError(
        f"{what} has schema version {version}, this qaudit reads up to {SCHEMA}",
        hint=f"install qaudit {str(document.get('qaudit'))[:20]} or later",
    )


def parse(text: str) -> Any:
    """Return a JSON document; ValueError for one that is damaged, too deep, or no JSON."""
    document = json_of(text)
    try:
        _check(document)
    except RecursionError as error:
        raise ValueError("it nests without end") from error
    return document


def read_object(path: Path, what: str, hint: str) -> dict[str, Any]:
    """Return the object in a file of JSON; AuditError for any other file, or none."""
    try:
        document = parse(read_regular(path, LARGEST_NBYTES).decode())
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise AuditError(f"{what} cannot be read: {reason}", hint=hint) from error
    if not isinstance(document, dict):
        raise AuditError(f"{what} is not an object", hint=hint)
    return document


def is_inside(name: str) -> bool:
    """Return whether a name with slashes, as a stranger may write it, stays below its folder."""
    odd = "\\" in name or not name.isprintable() or len(name) > 1000
    return not odd and not any(part in ("", ".", "..") for part in name.split("/"))


def schema_of(kind: Any, title: str, description: str) -> dict[str, Any]:
    from pydantic.json_schema import GenerateJsonSchema

    class Untitled(GenerateJsonSchema):
        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    described = _adapter(kind).json_schema(schema_generator=Untitled)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": description,
    }
    return {**head, **{k: v for k, v in described.items() if k not in head}}


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}
"""By type: making one takes a tenth of a second for an audit."""


def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(content) for key, content in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(content) for content in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _check(value: Any) -> None:
    """Refuse integers that no reader of JSON but Python can hold."""
    if isinstance(value, dict | list):
        for content in value.values() if isinstance(value, dict) else value:
            _check(content)
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ValueError(f"{str(value)[:20]}... is too large for a number")
