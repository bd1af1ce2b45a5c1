"""Write what repeats the code: docs/options.md, docs/findings.md and docs/gguf.md.

make readme
"""

from qaudit.formats.gguf.architectures import ARCHITECTURES, UNPROVED
from qaudit.types.metrics import CODES
from tests.house import commands
from tests.house.source import ROOT

FINDINGS = ROOT / "docs" / "findings.md"
HEAD = """# Every finding, by its code

<!-- written by `make readme` from the codes themselves: edit those -->

A code never changes its meaning: policies, ignores and dashboards name it. QA001, QA020 to QA027,
QA037 to QA041, QA045 and QA047 to QA050 hold an audit to a [policy](policy.md); the others judge
the audit itself. `qaudit explain QA038` says more, and `audit.json` has all under `findings`.

"""


def findings():
    """Return the page of findings."""
    rows = (f"- **{code}** {entry.title}. {entry.help}\n" for code, entry in CODES.items())
    return HEAD + "".join(rows)


GGUF = ROOT / "docs" / "gguf.md"
GGUF_HEAD = """# Which GGUF files are read

<!-- written by `make readme` from qaudit/formats/gguf/architectures.py: edit that -->

`--shipped model.gguf` ([quantized files](shipped.md)) reads the files of these types of
transformers, and of wrappers whose text is one of them. `make peers` compares a tiny file of
each, made by llama.cpp's own converter: tensors are those of the model, and logits within 1e-5 of
the largest, or as far apart as `tests/support/gguf_types.yaml` says.

"""
GGUF_REST = """
Models of these architectures are in transformers too, and their files are refused by name:

"""
GGUF_END = """
Of every other architecture transformers has no decoder, or only code that a repository ships.
"""


def gguf():
    """Return the page of GGUF files, by architecture of llama.cpp."""
    same = [name for name, code in ARCHITECTURES.items() if code.types == (name,)]
    read = [
        f"- {name}: {', '.join(code.types)}"
        for name, code in ARCHITECTURES.items()
        if name not in same
    ]
    rows = [f"- of the same name in llama.cpp: {', '.join(same)}", *read]
    refused = [f"- {', '.join(names)}: {why}" for why, names in UNPROVED.items()]
    return GGUF_HEAD + "\n".join(rows) + "\n" + GGUF_REST + "\n".join(refused) + "\n" + GGUF_END


if __name__ == "__main__":
    commands.PAGE.write_text(commands.page(), encoding="utf-8")
    FINDINGS.write_text(findings(), encoding="utf-8")
    GGUF.write_text(gguf(), encoding="utf-8")
