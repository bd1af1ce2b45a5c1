"""Division by scales of columns is exact, or refused by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.linears import FoldSource
from qaudit.core.registry import parse_scheme
from qaudit.errors import SchemeError
from qaudit.export.packed import divided, divided_codes, refuse_rounded, scale_of_rows

AWQ = parse_scheme("awq-4bit:exact_fold=true")


@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=8),
    st.sampled_from(["bfloat16", "float16", "float32"]),
)
def test_powers_of_two_divide_every_type_exactly(exponents: list[int], dtype: str) -> None:
    tensor_R = torch.linspace(-2, 3, len(exponents) + 2).to(getattr(torch, dtype))
    scale_R = torch.tensor([2.0**one for one in exponents])
    held_R = divided("norm.weight", tensor_R, scale_R)
    assert held_R.dtype == tensor_R.dtype
    assert torch.equal(held_R[: len(exponents)].double() * scale_R, tensor_R.double()[:-2])
    assert torch.equal(held_R[-2:], tensor_R[-2:])  # rows behind those that are scaled


def test_query_heads_divide_the_rows_that_they_share() -> None:
    source = FoldSource("v_proj", is_norm=False, offset=1)
    scale_R = scale_of_rows(AWQ, source, torch.tensor([0, 1, 0, 1]), torch.tensor([2.0, 4, 2, 4]))
    assert scale_R.tolist() == [1, 2, 4]


def test_what_would_be_rounded_is_refused() -> None:
    source = FoldSource("norm", is_norm=True)
    with pytest.raises(SchemeError, match="a file would round") as refusal:
        scale_of_rows(AWQ, source, torch.arange(2), torch.tensor([2.0, 3.0]))
    assert "exact_fold=true" in refusal.value.hint
    ones = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(SchemeError, match=r"`norm\.weight` is stored in bfloat16") as refusal:
        divided("norm.weight", ones / 128, torch.full((2,), 8.0), one_plus=True)  # 1.0078 / 8 - 1
    assert "scales no columns" in refusal.value.hint
    with pytest.raises(SchemeError, match="no scales that could take"):
        divided_codes("v_proj", parse_scheme("fp8").quantize, torch.ones(2))  # type: ignore[arg-type]


def test_parameters_alone_refuse_most() -> None:
    refuse_rounded(AWQ)
    refuse_rounded(parse_scheme("gptq-4bit"))
    for spec in ("awq-4bit", "smoothquant", "awq-4bit:unfolded=true:exact_fold=true"):
        with pytest.raises(SchemeError):
            refuse_rounded(parse_scheme(spec))
