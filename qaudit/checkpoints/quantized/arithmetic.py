"""Bits, scales and zero points -> numbers: what the formats of integers share.

Shapes: R output rows, C input columns, G groups of columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qaudit.checkpoints.quantized.format import refused

if TYPE_CHECKING:
    from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of a 4-bit float (E2M1); the fourth bit is the sign."""


def unpack_padded(words_RW: Tensor, bits: int, count: int) -> Tensor:
    """Return codes that never straddle words: the high bits of each word are unused."""
    import torch

    shifts_K = torch.arange(32 // bits, dtype=torch.int32) * bits
    codes_RWK = (words_RW.view(torch.int32)[..., None] >> shifts_K) & (2**bits - 1)
    codes_RN: Tensor = codes_RWK.reshape(len(words_RW), -1)
    return codes_RN[:, :count].to(torch.uint8)


def unpack_fp4(packed_RB: Tensor) -> Tensor:
    """Return the 4-bit floats of bytes, the low half of each first."""
    import torch

    table = torch.tensor((*FP4, *(-value for value in FP4)))
    halves_RBK = torch.stack((packed_RB & 15, packed_RB >> 4), dim=-1).flatten(-2)
    return table[halves_RBK.to(torch.int32)]


def power_of_two(exponents: Tensor) -> Tensor:
    """Return scales that are stored as a biased exponent alone (E8M0)."""
    import torch

    powers = exponents.view(torch.uint8).to(torch.int32) - 127
    return torch.ldexp(torch.ones(powers.shape), powers)


def wide(scales: Tensor, name: str) -> Tensor:
    """Return scales in float32; refuse any that are not finite."""
    import torch

    scales = scales.float()
    if not bool(torch.isfinite(scales).all()):
        count = int((~torch.isfinite(scales)).sum())
        raise refused(name, f"has {count} of {scales.numel()} scales that are not finite numbers")
    return scales


def scaled(name: str, centered_RC: Tensor, scales_RG: Tensor, group_of_C: Tensor) -> Tensor:
    """Multiply codes, less their zero points, by the scale of their group, in place.

    A scale of zero is right where every code of its group is zero, and loses them otherwise.
    """
    scales_RG = wide(scales_RG, name)
    if not bool(scales_RG.all()):
        lost_RC = (scales_RG == 0).index_select(1, group_of_C) & (centered_RC != 0)
        if count := int(lost_RC.sum()):
            raise refused(name, f"has scales of zero over {count} codes that are not zero")
    return centered_RC.mul_(scales_RG.index_select(1, group_of_C))


def in_order(columns: int, size: int) -> Tensor:
    """Return the group of each column where groups follow one another."""
    import torch

    return torch.arange(columns) // size


def indexed(name: str, group_of_C: Tensor, groups: int) -> Tensor:
    """Return stored groups of columns; refuse a group that does not exist."""
    import torch

    lowest, highest = (int(one) for one in torch.aminmax(group_of_C))
    if lowest < 0 or highest >= groups:
        wrong = lowest if lowest < 0 else highest
        raise refused(name, f"has a column in group {wrong}, and {groups} groups")
    return group_of_C.long()
