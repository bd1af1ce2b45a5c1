"""Whether `transformers` knows a model, found without importing torch, so that a plan can tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_own_code(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` names code of its repository for an unknown model type.

    A model type that the library knows is never run from a repository's code.
    """
    if not config.get("auto_map"):
        return False
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    return str(config.get("model_type")) not in CONFIG_MAPPING_NAMES
