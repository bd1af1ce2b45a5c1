"""The model card of a soup that is written: members, weights, commits and hashes."""

from __future__ import annotations

import json

from qaudit import __version__
from qaudit.report.markdown import cell, code, plain
from qaudit.types import Checkpoint, Subject


def soup_card(soup: Subject) -> str:
    """Return the README.md of a soup's folder, with the metadata that the Hub reads."""
    rows = [
        f"| {number} | {_named(checkpoint)} | {share:.17g} |"
        for number, (checkpoint, share) in enumerate(soup.members, 1)
    ]
    hashes = [
        f"- {code(file.sha256)} {code(f'{checkpoint.label}/{file.name}')}"
        for checkpoint, _ in soup.members
        for file in checkpoint.files
    ]
    parts = [
        _front_matter(soup),
        f"# {plain(soup.label)}",
        f"A merge of {len(soup.members)} checkpoints by {code(soup.merge or '')}, written by "
        f"qaudit {__version__}. Each tensor is summed in double precision, in this order, and "
        "rounded once to the dtype of the first member. Configuration and tokenizer are the "
        "first member's.",
        "\n".join(["| | member | weight |", "| --- | --- | --- |", *rows]),
        "The members' files, by the sha256 of their bytes:",
        "\n".join(hashes),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(soup: Subject) -> str:
    """Return the metadata: members on the Hub are its base models."""
    bases = dict.fromkeys(c.ref.location for c, _ in soup.members if c.commit)
    lines = ["---"]
    if bases:
        # JSON's quoted texts are YAML's: no name can be taken for anything else.
        lines += ["base_model:", *(f"- {json.dumps(base)}" for base in bases)]
        lines += ["base_model_relation: merge"]
    return "\n".join([*lines, "tags:", "- merge", "- model-soup", "---"])


def _named(checkpoint: Checkpoint) -> str:
    if checkpoint.commit is None:
        return cell(checkpoint.label)
    return f"{cell(str(checkpoint.ref))} at {cell(checkpoint.commit)}"
