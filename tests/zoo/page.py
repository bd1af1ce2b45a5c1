"""docs/models.md and docs/models.csv of the results."""

import csv
import io
from collections import Counter, defaultdict

from tests.zoo import tiny

HEAD = """\
# Which models run

`make zoo` wrote this page. Each causal type of transformers {transformers}, and each other type
that carries text, was made tiny with random weights, saved as the library saves it, and audited
in float32 on a CPU. Losses in full precision and under `rtn-4bit` are compared with those of
plain transformers, where a second implementation rounds the same linear layers: relative, of the
worst of three documents; above 1e-5 a type is **wrong**. The page says nothing about other
schemes, real checkpoints, other dtypes and GPUs, nor about a type that was not tried. A refusal for
the share of a block that is not linear may be one of these tiny sizes alone.

[models.csv](models.csv) has a row for each type: how far it is off, the KL divergence of
`gptq-4bit` over that of `rtn-4bit` (below 1 it is better), how many linear layers are quantized,
which stay in full precision, and why a type is refused.
"""
COLUMNS = (
    "kind", "type", "runs", "full precision", "rtn-4bit", "gptq over rtn", "quantized", "left",
    "reason",
)  # fmt: skip
OUTCOMES = ("in blocks", "refused", "wrong", "not tried")


def kinds():
    return {"Decoders": tiny.decoders(), "Wrappers and others that carry text": tiny.wrappers()}


def page(results):
    types = results["types"]
    parts = [HEAD.format(transformers=results["transformers"]), _counts(types)]
    for title, names in kinds().items():
        rows = {n: types[n] for n in names if n in types}
        parts.append(f"## {title}\n")
        for outcome in OUTCOMES:
            by_reason = defaultdict(list)
            for name, row in rows.items():
                if row["runs"] == outcome:
                    by_reason[row.get("reason", "").replace(f"`{name}`", "type")].append(name)
            if outcome == "in blocks":
                parts.append(f"Run: {', '.join(by_reason.get('', []))}.\n")
            elif outcome == "not tried" and by_reason:
                names = [name for listed in by_reason.values() for name in listed]
                parts.append(f"Not tried: {', '.join(names)}.\n")
            elif by_reason:
                lines = [f"- {', '.join(names)}: {why}" for why, names in by_reason.items()]
                parts.append("\n".join([f"{outcome.capitalize()}:\n", *lines, ""]))
    return "\n".join(parts)


def table(results):
    """Return every row as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_cells(results["types"]))
    return text.getvalue()


def _cells(types):
    for title, names in kinds().items():
        kind = "decoder" if title == "Decoders" else "wrapper"
        for name in names:
            row = types.get(name, {})
            numbers = (row.get(key, "") for key in ("runs", "fp", "rtn", "gptq", "quantized"))
            yield kind, name, *numbers, " ".join(row.get("left", ())), row.get("reason", "")


def _counts(types):
    lines = [f"| | {' | '.join(OUTCOMES)} |", "| --- |" + " --- |" * len(OUTCOMES)]
    for title, names in kinds().items():
        counts = Counter(types[n]["runs"] for n in names if n in types)
        lines.append(f"| {title} | {' | '.join(str(counts[c]) for c in OUTCOMES)} |")
    return "\n".join(lines) + "\n"
