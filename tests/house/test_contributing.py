"""The examples in CONTRIBUTING.md work."""

from __future__ import annotations

import re

import torch

from qaudit.core.merge import Merge
from qaudit.core.scheme import Linears, Scheme
from tests.house.source import ROOT

PREAMBLE = """
from dataclasses import dataclass
from typing import ClassVar
from qaudit.core.finite import refuse_nonfinite
from qaudit.core.merge import Merge
from qaudit.core.scheme import Linears, Quantized, Scheme
"""


def example(name: str) -> type:
    """Return the class of this name from the first block that defines it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (block,) = (block for block in blocks if f"class {name}(" in block)
    scope: dict[str, type] = {"__name__": __name__}
    text = PREAMBLE + block.replace("\n...\n", "\n")
    exec(compile(text, "CONTRIBUTING.md", "exec", dont_inherit=True), scope)
    return scope[name]


def test_the_scheme_quantizes() -> None:
    scheme = example("Sign")()
    assert isinstance(scheme, Scheme)
    weight_RC = torch.tensor([[1.0, -3.0], [0.0, 0.0]])
    done = scheme.quantize(Linears({"a": weight_RC}))
    assert done.weights["a"].tolist() == [[2.0, -2.0], [0.0, 0.0]]
    assert done.bits == 4 + 2 * 16
    assert scheme.spec == "sign"


def test_the_merge_merges() -> None:
    merge = example("First")()
    assert isinstance(merge, Merge)
    tensors = [torch.ones(2), torch.zeros(2)]
    assert merge.merge(tensors, [0.5, 0.5]).tolist() == [1.0, 1.0]
