"""The lazy name of torch: nothing is loaded before something of it is used."""

from __future__ import annotations

import subprocess
import sys

import torch

from qaudit.support import lazy

LOADS_LATE = """
import sys
from qaudit.support.lazy import Tensor, torch
assert "torch" not in sys.modules
assert isinstance(torch.zeros(2), Tensor) and not isinstance(2, Tensor)
assert torch.float32 is sys.modules["torch"].float32
"""


def test_torch_is_loaded_where_it_is_first_used() -> None:
    subprocess.run([sys.executable, "-c", LOADS_LATE], check=True)


def test_the_lazy_name_is_torch_itself_with_what_is_patched_in_it(monkeypatch) -> None:
    assert lazy.torch.nn is torch.nn
    monkeypatch.setattr(torch, "zeros", lambda *size: "patched")
    assert lazy.torch.zeros(3) == "patched"
