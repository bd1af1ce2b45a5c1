"""Is the device of a part sound? Products of matrices that have one exact answer.

Entries are -1, 0 and 1. Every partial sum is then an integer that float32 holds exactly, whatever
the order, tiles or kernels: every sound device gives the same bits, in float32 and, rounded once,
in bfloat16 and float16. A softmax beside it, which has no exact answer, is held to double
precision on the CPU. A device that fails is defective (memory, tensor cores, driver), and nothing
is measured on it.
"""

from __future__ import annotations

import torch

from qaudit.engine.machine import device_name
from qaudit.errors import OtherIdentityError

SIZE, SEED = 1024, 20251012
CLOSE = 1e-5  # of probabilities in float32 from those in double precision


def refuse_bad_device(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a device that computes wrongly, before any weight is read."""
    for kind in dict.fromkeys((torch.float32, dtype)):
        wrong = wrong_products(device, kind)
        if wrong:
            raise _bad(device, f"{wrong} of {SIZE * SIZE} products in {_name(kind)} are wrong")
    apart = softmax_error(device)
    if not apart < CLOSE:
        raise _bad(device, f"probabilities are off by {apart:.1e} (at most {CLOSE:.0e} is sound)")


def wrong_products(device: torch.device, dtype: torch.dtype) -> int:
    """Return how many entries of a product differ from their integers, rounded once."""
    a, b = (matrix.to(dtype).to(device) for matrix in _matrices())
    exact = torch.matmul(*(matrix.double() for matrix in _matrices()))  # below 2**53: exact
    product = torch.matmul(a, b).cpu()
    return int((product != exact.float().to(dtype)).sum())


def softmax_error(device: torch.device) -> float:
    """Return how far probabilities are from those in double precision on the CPU."""
    logits = torch.matmul(*(matrix.double() for matrix in _matrices()))[:64] / 16
    found = logits.float().to(device).softmax(-1).cpu().double()
    return float((found - logits.softmax(-1)).abs().max())


def _matrices() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    a, b = (torch.randint(-1, 2, (SIZE, SIZE), generator=generator) for _ in range(2))
    return a, b


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bad(device: torch.device, why: str) -> OtherIdentityError:
    return OtherIdentityError(
        f"the device `{device_name(device)}` computes wrongly: {why}",
        hint="run the part on another device; have this one checked",
    )
