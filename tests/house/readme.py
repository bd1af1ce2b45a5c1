"""Write what repeats the code: docs/options.md, docs/findings.md and docs/gguf.md.

make readme
"""

from __future__ import annotations

from qaudit.formats.gguf.architectures import ARCHITECTURES, UNPROVED
from qaudit.types.metrics import CODES
from tests.house import commands
from tests.house.source import ROOT

FINDINGS = ROOT / "docs" / "findings.md"
HEAD = """# Every finding, by its code

<!-- written by `make readme` from the codes themselves: edit those -->

A finding has a code, which never changes its meaning: policies, ignores and dashboards name it.
QA001, QA020 to QA027, QA037 to QA041, QA045 and QA047 to QA049 hold an audit to a
[policy](policy.md); the others judge the audit itself. The card shows the worst of each code,
`audit.json` all of them under `findings`, and `qaudit list rules` prints the codes.

| code | finding | why it matters |
| --- | --- | --- |
"""


def findings() -> str:
    """Return the page of findings."""
    rows = (f"| {code} | {entry.title} | {entry.help} |\n" for code, entry in CODES.items())
    return HEAD + "".join(rows)


GGUF = ROOT / "docs" / "gguf.md"
GGUF_HEAD = """# Which GGUF files are read

<!-- written by `make readme` from qaudit/formats/gguf/architectures.py: edit that -->

`--shipped model.gguf` ([files that are quantized already](shipped.md)) reads the files of these
types of transformers, and of wrappers whose text is one of them. `make peers` makes a tiny file of
each with llama.cpp's own converter: its tensors are those of the model, and llama.cpp has the
logits of the model, within 1e-5 of the largest; where llama.cpp rounds more, as in its table of
gelu, `tests/support/gguf_types.yaml` says how far. Given up: Mistral, Phi-3 and StarCoder2 run with
full attention in llama.cpp, and with their window here.

| architecture of llama.cpp | `model_type` |
| --- | --- |
"""
GGUF_REST = """
Models of these architectures are in transformers too, and their files are refused by name:

| architecture of llama.cpp | why |
| --- | --- |
"""
GGUF_END = """
Of every other architecture transformers has no decoder, or only code that a repository ships.
"""


def gguf() -> str:
    """Return the page of GGUF files."""
    read = (f"| {name} | {', '.join(code.types)} |\n" for name, code in ARCHITECTURES.items())
    refused = (f"| {name} | {why} |\n" for name, why in UNPROVED.items())
    return GGUF_HEAD + "".join(read) + GGUF_REST + "".join(refused) + GGUF_END


if __name__ == "__main__":
    commands.PAGE.write_text(commands.page(), encoding="utf-8")
    FINDINGS.write_text(findings(), encoding="utf-8")
    GGUF.write_text(gguf(), encoding="utf-8")
