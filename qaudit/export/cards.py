"""The README.md of an exported folder: what it holds, what was measured, and what loads it.

And that of a soup: its members, their files and their weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from qaudit.checkpoints.stamps import folder_of
from qaudit.errors import QauditError
from qaudit.export.contents import README
from qaudit.hub.metadata import front_matter
from qaudit.report.document import (
    Block,
    Cell,
    CodeBlock,
    List,
    Section,
    TableBlock,
    bullets,
    cell,
    code,
    name_cell,
    paragraph,
    status_in_words,
    table,
    words,
)
from qaudit.report.format import percent, spread
from qaudit.report.markdown import render_blocks
from qaudit.report.views import judged
from qaudit.saved.exports import FILE, ExportRecord
from qaudit.types import Checkpoint, Subject
from qaudit.version import __version__
from qaudit.whole import read_regular

if TYPE_CHECKING:
    from qaudit.export.choice import ExportChoice
    from qaudit.formats.packing import Document, Format
    from qaudit.hub import Hub


_OF_BASE = ("license", "license_name", "license_link", "language", "datasets", "pipeline_tag")
"""What the card of a base says that holds for its quantized form."""

_LARGEST_NBYTES = 5_000_000


def base_metadata(subject: Subject, hub: Hub | None) -> Mapping[str, Any]:
    """Return the front matter of the first member's README; nothing if there is none."""
    base = subject.first
    path = folder_of(base) / README
    with suppress(QauditError, OSError, UnicodeDecodeError):
        if base.commit is not None and hub is not None:
            repo = base.ref.location
            files = [f for f in hub.listing.files(repo, base.commit) if f.path == README]
            path = hub.fetcher.files(repo, base.commit, README, files, show=False) / README
        return front_matter(read_regular(path, _LARGEST_NBYTES).decode())
    return {}


def export_card(
    choice: ExportChoice, record: ExportRecord, form: Format, config: Document, place: str
) -> str:
    """Return the card of a folder with a `config.json`, which is loaded from a place."""
    model = next(iter(config.get("architectures") or ()), "AutoModelForCausalLM")
    if str(model).endswith("ForCausalLM"):
        model = "AutoModelForCausalLM"
    snippet = form.snippet(place, str(model), config.get("quantization_config", {}))
    audit = f" The audit has the sha256 {record.audit_sha256}." if record.audit_sha256 else ""
    blocks = [
        paragraph(
            (
                *code(record.subject),
                *words(" under "),
                *code(record.spec),
                *words(
                    f", as {record.format} files of {record.bits_per_weight:.3f} bits per "
                    f"quantized weight, written by qaudit {record.qaudit}. Embeddings, norms and "
                    "the head are as they were."
                ),
            )
        ),
        *([_members(choice.subject)] if choice.subject.merge else []),
        *_measured(choice),
        CodeBlock(snippet, "console" if snippet.startswith("$") else "python"),
        paragraph(words("Lowest versions that load these files, and what they need:")),
        table(
            ("runtime", "version", "note"),
            ((runtime.name, runtime.lowest, runtime.remark or "-") for runtime in form.runtimes),
        ),
        paragraph(
            (
                *code(FILE),
                *words(" has a hash of every weight as it was measured; "),
                *code("qaudit verify"),
                *words(f" compares them with the files.{audit}"),
            )
        ),
    ]
    card = Section(f"{record.subject}, {record.scheme}", tuple(blocks))
    base = base_metadata(choice.subject, choice.hub)
    tags = ("quantized", "qaudit")
    front = _front_matter(choice.subject, "quantized", tags, form.library, base)
    return f"{front}\n\n{render_blocks([card], level=1)}\n"


def _measured(choice: ExportChoice) -> list[Block]:
    rows = [
        row
        for row in (choice.record.measurements if choice.record else ())
        if row.subject == choice.subject.label
        and (row.scheme == choice.scheme.short or row.spec == choice.scheme.spec)
    ]
    if not rows:
        return [paragraph("No audit measured these weights.")]
    first = judged(rows[0], choice.ships) if choice.ships else rows[0]
    added = percent(first.relative_error, unit=" %") if first.relative_error else "-"
    numbers = {
        "loss, nats per token": spread(first.ce),
        "added loss": added,
        "KL divergence, nats per token": spread(first.kl) if first.kl else "-",
        "documents": str(first.documents),
    }
    blocks: list[Block] = [table(("measured", "value"), numbers.items())]
    if choice.ships is not None:
        ships = choice.ships
        status = status_in_words(ships.status)
        blocks.append(paragraph(f"The verdict on {ships.bit_class} bits: {status}."))
        if notes := (*ships.breaches, *ships.needs, *ships.warnings):
            blocks.append(bullets(*notes))
    else:
        blocks.append(paragraph("The audit's verdict is about other weights, not about these."))
    return blocks


def _front_matter(
    subject: Subject, relation: str, tags: Sequence[str], library: str, base: Mapping[str, Any]
) -> str:
    """Return the metadata that the Hub reads: checkpoints on the Hub are base models."""
    bases = dict.fromkeys(c.ref.location for c, _ in subject.members if c.commit)
    values: dict[str, Any] = {"base_model": list(bases)} if bases else {}
    if bases:
        values["base_model_relation"] = relation
    values["library_name"] = library
    kept = {key: base[key] for key in _OF_BASE if _is_plain(base.get(key))}
    values |= {"pipeline_tag": "text-generation", **kept, "tags": list(tags)}
    lines = ["---"]
    for key, value in values.items():
        # JSON's quoted texts are YAML's: no name can be taken for anything else.
        if isinstance(value, list):
            lines += [f"{key}:", *(f"- {json.dumps(each)}" for each in value)]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join([*lines, "---"])


def _is_plain(value: object) -> bool:
    """Return whether a value of a foreign README is a text or a list of texts."""
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(text, str) and text for text in texts)


def soup_card(soup: Subject, hub: Hub | None = None) -> str:
    files = List(
        tuple(
            (*code(file.sha256), *words(" "), *code(f"{checkpoint.label}/{file.name}"))
            for checkpoint, _ in soup.members
            for file in checkpoint.files
        )
    )
    description = (
        *words(f"A merge of {len(soup.members)} checkpoints by "),
        *code(soup.merge or ""),
        *words(
            f", written by qaudit {__version__}. Each tensor is summed in double precision, in "
            "this order, and rounded once to the dtype of the first member. Configuration and "
            "tokenizer are the first member's."
        ),
    )
    title = paragraph("The members' files, by the sha256 of their bytes:")
    card = Section(soup.label, (paragraph(description), _members(soup), title, files))
    base = base_metadata(soup, hub)
    front = _front_matter(soup, "merge", ("merge", "model-soup"), "transformers", base)
    return f"{front}\n\n{render_blocks([card], level=1)}\n"


def _members(soup: Subject) -> TableBlock:
    rows = (
        (str(number), _member(checkpoint), share_text(share))
        for number, (checkpoint, share) in enumerate(soup.members, 1)
    )
    return table(("", "member", "weight"), rows)


def share_text(share: float) -> str:
    """Return a weight as people write it: `0.75`, `1/3`, or all digits of any other number."""
    short, ratio = f"{share:.6g}", Fraction(share).limit_denominator(1000)
    if float(short) == share:
        return short
    return str(ratio) if float(ratio) == share else f"{share:.17g}"


def _member(checkpoint: Checkpoint) -> Cell:
    if checkpoint.commit is None:
        return name_cell(checkpoint.label)
    return cell((*code(str(checkpoint.ref)), *words(" at "), *code(checkpoint.commit)))
