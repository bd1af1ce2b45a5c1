"""The JSON schema of policy files, for editors and for programs that write them.

    python -m qaudit.policy.schema

writes `policy.schema.json` beside this file, from the keys themselves; a test holds it equal.
"""

from __future__ import annotations

import json
from pathlib import Path

from qaudit.policy.keys import PolicyKeys

FILE = Path(__file__).with_name("policy.schema.json")


def schema_text() -> str:
    """Return the schema as it is published."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **PolicyKeys.model_json_schema(),
    }
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
