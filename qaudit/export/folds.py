"""Scales of columns in a file: what precedes the linears is divided by them, exactly or not at all.

A scheme that multiplies columns measures the weights that it divides again. A file holds them
multiplied, beside a norm or an earlier linear that is divided. Powers of two divide any number
exactly; with other scales a file would hold other weights than were measured.
"""

from __future__ import annotations

from dataclasses import replace

from qaudit.core.linears import FoldSource, IntegerCodes, StoredWeight
from qaudit.core.scheme import Scheme
from qaudit.errors import SchemeError
from qaudit.settings import EXAMPLE_SCHEME
from qaudit.support.lazy import Tensor, torch


def refuse_rounded(scheme: Scheme) -> None:
    """Refuse a scheme whose scales of columns no file holds, by its parameters."""
    if getattr(scheme, "unfolded", False):
        raise SchemeError(
            f"`{scheme.short}` has scales of columns that a kernel applies, and no current "
            "runtime has such a kernel",
            hint="scan and export with unfolded=false",
        )
    if getattr(scheme, "exact_fold", True) is False:
        raise rounded(scheme)


def rounded(scheme: Scheme) -> SchemeError:
    """Make the error for scales that are no powers of two."""
    return SchemeError(
        f"`{scheme.short}` divides norms and earlier linears by scales that a file would round: "
        "it would hold other weights than were measured",
        hint="scan and export with exact_fold=true, which has powers of two",
    )


def scale_of_rows(scheme: Scheme, source: FoldSource, fold_C: Tensor, scale_C: Tensor) -> Tensor:
    """Return the divisors of the first rows of a source, from its offset on."""
    mantissa_C, _ = torch.frexp(scale_C)
    if not bool((mantissa_C == 0.5).all()):
        raise rounded(scheme)
    size = source.offset + int(fold_C.max()) + 1
    scale_R = torch.ones(size, dtype=scale_C.dtype, device=scale_C.device)
    scale_R[source.offset + fold_C] = scale_C
    return scale_R.cpu()


def divided_codes(name: str, stored: StoredWeight, scale_R: Tensor) -> IntegerCodes:
    """Divide the rows of a quantized linear by dividing its scales; codes stay."""
    if not isinstance(stored, IntegerCodes):
        raise SchemeError(
            f"`{name}` has no scales that could take those of the linears behind it",
            hint=f"export a scheme that scales no columns, such as {EXAMPLE_SCHEME}",
        )
    return replace(stored, scales_RG=divided(name, stored.scales_RG.cpu(), scale_R))


def divided(name: str, tensor: Tensor, scale_R: Tensor, *, one_plus: bool = False) -> Tensor:
    """Divide rows, or the numbers of a norm; refuse what the tensor's dtype does not hold."""
    scales = torch.ones(len(tensor), dtype=torch.float64)
    scales[: len(scale_R)] = scale_R
    scales = scales.reshape(-1, *[1] * (tensor.dim() - 1))
    wide = tensor.double()
    exact = (1 + wide) / scales - 1 if one_plus else wide / scales
    held = exact.to(tensor.dtype)
    if not torch.equal(held.double(), exact):
        raise SchemeError(
            f"`{name}` is stored in {str(tensor.dtype).removeprefix('torch.')}, which does not "
            "hold its numbers divided by the scales of the linears behind it",
            hint=f"export a scheme that scales no columns, such as {EXAMPLE_SCHEME}",
        )
    return held
