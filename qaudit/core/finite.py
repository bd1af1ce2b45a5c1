"""Refuse NaN and infinity by name, in one place, before any scheme computes with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qaudit.errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor

    from qaudit.core.scheme import Inputs, Linears


def refuse_nonfinite(linears: Linears) -> None:
    """Refuse linears with a weight, or inputs, that are not finite numbers."""
    for name, weight_RC in linears.weights.items():
        if not _is_finite(weight_RC):
            raise SourceError(
                f"the weight of `{name}` holds NaN or infinity",
                hint="the checkpoint is damaged or its training diverged; try another revision",
            )
    if linears.inputs is not None and not (
        _is_finite(linears.inputs.gram_CC) and _is_finite(linears.inputs.absmean_C)
    ):
        names = ", ".join(f"`{name}`" for name in linears.weights)
        raise SourceError(
            f"the calibration inputs of {names} hold NaN or infinity",
            hint="an earlier layer overflowed; try `--dtype float32`",
        )


def required_inputs(linears: Linears, scheme: str) -> Inputs:
    """Return the statistics of the calibration inputs, which this scheme cannot do without."""
    if linears.inputs is None or linears.inputs.tokens < 1:
        names = ", ".join(f"`{name}`" for name in linears.weights)
        raise SourceError(
            f"no calibration token reached {names}, which `{scheme}` needs",
            hint="give more calibration text",
        )
    return linears.inputs


def _is_finite(values: Tensor) -> bool:
    import torch

    if values.numel() == 0:
        return True
    # The extremes of a tensor are finite exactly when all of it is, and cost no copy of it.
    smallest, largest = torch.aminmax(values)
    return bool(torch.isfinite(smallest) & torch.isfinite(largest))
