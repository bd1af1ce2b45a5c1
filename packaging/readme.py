"""README.md as an index shows it: hatchling asks for it when it builds.

An index has no files beside the page, so links to files of this repository become links to
`[project.urls]`, at the tag of a release or on `main` before one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)(\[[^]]*\])\((?![a-z]+:|#)([^)]+)\)")


class Readme(MetadataHookInterface):
    """The one field that is made while building."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        version = metadata["version"]
        tag = "main" if "dev" in version else f"v{version}"
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, metadata["urls"]["Repository"], tag),
        }


def absolute(text: str, repository: str, tag: str) -> str:
    """Make links to files absolute; pictures need the file itself, not the page about it."""

    def link(match: re.Match[str]) -> str:
        picture, words, path = match.groups()
        return f"{picture}{words}({repository}/{'raw' if picture else 'blob'}/{tag}/{path})"

    return _LINK.sub(link, text)
