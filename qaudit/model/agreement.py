"""Whether the members of a soup are one architecture, by what their configurations say.

Names and shapes of tensors do not tell: a head of another width, a rope of another base or
another activation fits the same tensors. What the configuration's class knows is compared, key
by key; what a repository added on its own (the number of the checkpoint, say) is not, and
neither is what has no part in the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qaudit.errors import SourceError
from qaudit.model.config import read_config

NOT_COMPARED = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",  # what is stored is read, and merged in double precision
        "id2label",
        "label2id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def must_be_one_architecture(labels: Sequence[str], folders: Sequence[Path]) -> None:
    """Refuse members whose configurations differ, naming the first key that does."""
    if len(folders) < 2:
        return
    first = _settings(folders[0])
    for label, folder in zip(labels[1:], folders[1:], strict=True):
        other = _settings(folder)
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise SourceError(
                    f"`{labels[0]}` and `{label}` cannot be merged: `{key}` is "
                    f"{first.get(key)} in one configuration and {other.get(key)} in the other",
                    hint="a soup needs members of one architecture",
                )


def _settings(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    known = type(config)().to_dict().keys()
    found = {key: value for key, value in config.to_dict().items() if key in known}
    return {key: value for key, value in found.items() if key not in NOT_COMPARED}
