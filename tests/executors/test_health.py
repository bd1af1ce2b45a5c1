"""A sound device passes; one wrong product, or one probability that is off, is refused."""

from __future__ import annotations

import pytest
import torch

from qaudit.errors import OtherIdentityError
from qaudit.executors import part as ready
from qaudit.executors.part import refuse_bad_device, softmax_error, wrong_products

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "SIZE", 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sound_device_gives_every_integer(small: None, dtype: torch.dtype) -> None:
    assert wrong_products(CPU, dtype) == 0
    refuse_bad_device(CPU, dtype)


def test_products_are_those_of_integers(small: None) -> None:
    """The reference is exact: integers of 64 bits give the same."""
    a, b, exact = ready._product(ready.SIZE)
    assert torch.equal(exact.long(), torch.matmul(a, b))


def broken(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Make one product of matrices in this dtype wrong by its last bit."""
    matmul = torch.matmul

    def once_wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = matmul(a, b)
        if product.dtype == dtype:
            product[3, 5] = torch.nextafter(product[3, 5], torch.tensor(torch.inf, dtype=dtype))
        return product

    monkeypatch.setattr(torch, "matmul", once_wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_bit_is_enough(
    small: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    broken(monkeypatch, dtype)
    assert wrong_products(CPU, dtype) == 1
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(OtherIdentityError, match=f"1 of 16384 products in {name} are wrong") as bad:
        refuse_bad_device(CPU, dtype)
    assert "on another device" in bad.value.hint


@pytest.mark.parametrize("off", [1e-4, float("nan")])
def test_probabilities_that_are_off_are_refused(
    small: None, monkeypatch: pytest.MonkeyPatch, off: float
) -> None:
    assert softmax_error(CPU) < ready.CLOSE / 10
    monkeypatch.setattr(ready, "softmax_error", lambda _: off)
    with pytest.raises(OtherIdentityError, match="probabilities are off by"):
        refuse_bad_device(CPU, torch.float32)
