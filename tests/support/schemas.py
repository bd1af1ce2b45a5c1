"""The published schema of audit.json."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import jsonschema

SCHEMA = json.loads(resources.files("qaudit.saved").joinpath("audit.schema.json").read_text())


VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def violations(value: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(value)]
