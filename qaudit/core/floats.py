"""Floating-point formats of 8 and 4 bits: e4m3, NVFP4 and MXFP4.

    e2m1     0 0.5 1 1.5 2 3 4 6, ties to the even code, clipped at 6
    e4m3     as torch rounds, clipped at 448
    FP8      x = code * scale, scale = largest / 448, in float32, of a row or a square of weights
    MXFP4    one power of two per 32 columns. Two rules are in use: OCP's floors log2(largest), so
             that up to a quarter of the largest is clipped (`floor`: torchao, llama.cpp); others
             first round the largest to one bit of mantissa (`even`: compressed-tensors, vLLM)
    NVFP4    one e4m3 scale per 16 columns under one float32 scale of the tensor, which a file
             holds inverted: g = 448 * 6 / largest of the tensor, and
             scale = e4m3(g * largest of the group / 6) / g

All arithmetic is in float32, whatever dtype comes in. compressed-tensors computes scales in the
dtype of the weights: in bf16 27 % of the values of FP8 differ, in float32 none
(tests/peers/test_compressed_tensors.py). A last group that does not fill up is one of its own.

**Activations** are rounded to these floats and to 8-bit integers. Every scale is of one token, or
of a group of its columns, and computed as the token arrives. All steps work in place on a float32
copy.

**Keys and values** rounded as a quantized cache would hold them.

A server keeps the key, behind the rotary embedding, and the value of every token, and `kv` is the
type it keeps them in. Each head of each token is a group with a scale of its own, in bfloat16:

    int8, int4   asymmetric: scale = (max - min) / (2^b - 1), zero = round(-min / scale), the range
                 always including 0, as QuaRot and KIVI hold values
    fp8          e4m3, symmetric: scale = largest / 448

Queries are not rounded. Every token reads rounded keys and values, its own too; a server that
keeps the latest tokens as they are (KIVI) loses less. vLLM's `fp8` has one scale for a whole layer.

A scheme that rotates rounds both in a rotated basis, R of a head's width: q k^T = (qR) (kR)^T, so
that a key that is rotated, rounded and rotated back gives the scores of QuaRot's online R3, and a
value the output of its R2. Without rounding both leave the model what it is.

Shapes: R rows, N tokens, C columns, G groups of columns, K columns of one group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qaudit.core.grid import SMALLEST_SCALE, as_stored, fit, fit_range, fit_share
from qaudit.core.linears import StoredWeight
from qaudit.core.rotation import rotate
from qaudit.core.scheme import CACHES, UNROUNDED
from qaudit.support.lazy import Tensor, torch

E2M1_LARGEST, E4M3_LARGEST = 6.0, 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The value of each code; a code of 8 more is its negative."""
SQUARE = 128  # rows and columns of weights that share a scale of `fp8:blocks`
MX_GROUP, NV_GROUP = 32, 16
SMALLEST_NV_SCALE = 2.0**-3  # what compressed-tensors stores for a scale that rounds to zero
E8M0_BIAS = 127
_EXPONENT = 0x7F800000  # its bits in a float32


def round_e2m1_(x: Tensor) -> Tensor:
    """Round float32 numbers to the nearest 4-bit float in place, without signs of zeros."""
    return _to_mantissa_(x.clamp_(-E2M1_LARGEST, E2M1_LARGEST), 1, 1.0)


def round_e4m3_(x: Tensor) -> Tensor:
    """Round float32 numbers to the nearest 8-bit float in place, without signs of zeros."""
    return _to_mantissa_(x.clamp_(-E4M3_LARGEST, E4M3_LARGEST), 3, 2.0**-6)


def _to_mantissa_(x: Tensor, bits: int, smallest_normal: float) -> Tensor:
    """Round float32 numbers to so many bits of mantissa, ties to even, in place.

    A number plus 1.5 * 2^23 steps has no room for less than a step. Steps are those of the
    number's power of two, and below the smallest normal number its own. This takes a tenth of the
    time of choosing steps by comparisons, and of the way back from 8-bit floats.
    """
    power = (x.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=smallest_normal)
    steps = 1.5 * 2.0 ** (23 - bits)
    return x.add_(power, alpha=steps).sub_(power, alpha=steps)


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude along the last dimension of float32 numbers, which is kept.

    Magnitudes are in the order of their bits, and integers are compared up to four times faster.
    """
    return torch.amax(x.abs().view(torch.int32), -1, keepdim=True).view(torch.float32)


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)


def fp8_scale(largest: Tensor) -> Tensor:
    """Return the scale that takes a largest magnitude to 448."""
    scale = largest / E4M3_LARGEST
    return torch.where(scale == 0, 1.0, scale)


def mx_scale(largest: Tensor, rule: str) -> Tensor:
    """Return the power of two that takes the largest magnitude of a group to at most 8."""
    bits = largest.view(torch.int32)
    if rule == "even":  # 1.75 times a power of two, and more, counts as the next one
        bits = bits + (1 << 21)
    biased = (bits >> 23) - 2  # 6 is 1.5 * 2^2
    return (biased.clamp_(1, 254) << 23).view(torch.float32)


def tensor_scale(largest: Tensor) -> Tensor:
    """Return NVFP4's float32 scale of a tensor, by its largest magnitude."""
    return torch.where(largest > 0, E4M3_LARGEST * E2M1_LARGEST / largest, 1.0)


def nv_scale(largest: Tensor, scale: Tensor) -> Tensor:
    """Return the scales of groups, all of them 8-bit floats, to be divided by the tensor's."""
    scales = round_e4m3_(scale * (largest / E2M1_LARGEST))
    return torch.where(scales == 0, SMALLEST_NV_SCALE, scales)


def exponents_of(powers: Tensor) -> Tensor:
    """Return powers of two as MXFP4 stores them, plus 127; 255 for what is not finite."""
    return (powers.view(torch.int32) >> 23).to(torch.uint8)


def powers_of(exponents: Tensor) -> Tensor:
    """Return the powers of two of stored exponents."""
    ones = torch.ones_like(exponents, dtype=torch.float32)
    return torch.ldexp(ones, exponents.to(torch.int32) - E8M0_BIAS)


@dataclass(frozen=True, eq=False)
class Float8Codes(StoredWeight):
    """8-bit floats under a scale for each row, or for each square of 128 x 128."""

    codes_RC: Tensor  # float8_e4m3fn
    scales: Tensor  # (R, 1), or one for each square, in the type in which they are stored
    squares: bool = False

    @classmethod
    def of(cls, weight_RC: Tensor, *, squares: bool, scale_dtype: str = "float32") -> Float8Codes:
        """Round a float32 weight, by scales that are rounded first."""
        magnitude_RC = weight_RC.abs()
        largest = magnitude_RC.amax(-1, keepdim=True)
        if squares:
            rows, columns = weight_RC.shape
            padding = (0, -columns % SQUARE, 0, -rows % SQUARE)
            padded_RC: Tensor = torch.nn.functional.pad(magnitude_RC, padding)
            largest = padded_RC.unflatten(0, (-1, SQUARE)).unflatten(2, (-1, SQUARE)).amax((1, 3))
        scales = as_stored(fp8_scale(largest), scale_dtype)
        codes_RC = e4m3(weight_RC / _spread(scales.float(), weight_RC.shape, squares))
        return cls(codes_RC, scales, squares)

    def decode(self) -> Tensor:
        scales = _spread(self.scales.float(), self.codes_RC.shape, self.squares)
        # Several times faster than torch converts 8-bit floats.
        values = torch.arange(256, dtype=torch.uint8).view(self.codes_RC.dtype).float()
        return _looked_up(values, self.codes_RC.view(torch.uint8)).mul_(scales)

    @property
    def nbits(self) -> int:
        return 8 * (self.codes_RC.numel() + self.scales.nbytes)


@dataclass(frozen=True, eq=False)
class MxFloat4Codes(StoredWeight):
    """4-bit floats under a power of two for each 32 columns."""

    codes_RC: Tensor  # uint8, 0 to 15
    exponents_RG: Tensor  # uint8: the power of two, plus 127

    @classmethod
    def of(cls, weight_RC: Tensor, *, rule: str) -> MxFloat4Codes:
        scales_RG = mx_scale(_group_largest(weight_RC, MX_GROUP), rule)
        codes_RC = e2m1_codes(weight_RC / _widened(scales_RG, weight_RC.shape[1], MX_GROUP))
        return cls(codes_RC, exponents_of(scales_RG))

    def decode(self) -> Tensor:
        return _float4_values(self.codes_RC, powers_of(self.exponents_RG), MX_GROUP)

    @property
    def nbits(self) -> int:
        return 4 * self.codes_RC.numel() + 8 * self.exponents_RG.numel()


@dataclass(frozen=True, eq=False)
class NvFloat4Codes(StoredWeight):
    """4-bit floats under an 8-bit float for each 16 columns and a float32 for the tensor."""

    codes_RC: Tensor  # uint8, 0 to 15
    scales_RG: Tensor  # float8_e4m3fn
    tensor_scale: Tensor  # float32, by which the scales are divided
    input_scale: Tensor | None = None  # the same of the activations, where these are quantized

    @classmethod
    def of(cls, weight_RC: Tensor, scale: Tensor, input_scale: Tensor | None) -> NvFloat4Codes:
        """Round a float32 weight under the scale that its group of linears shares."""
        scales_RG = nv_scale(_group_largest(weight_RC, NV_GROUP), scale)
        scales_RC = _widened(scales_RG / scale, weight_RC.shape[1], NV_GROUP)
        codes_RC = e2m1_codes(weight_RC / scales_RC)
        return cls(codes_RC, e4m3(scales_RG), scale, input_scale)

    def decode(self) -> Tensor:
        scales_RG = self.scales_RG.float() / self.tensor_scale
        return _float4_values(self.codes_RC, scales_RG, NV_GROUP)

    @property
    def nbits(self) -> int:
        tensors = 1 if self.input_scale is None else 2
        return 4 * self.codes_RC.numel() + 8 * self.scales_RG.numel() + 32 * tensors


def e2m1_codes(x: Tensor) -> Tensor:
    """Return the codes of the nearest 4-bit floats, the sign in the highest bit."""
    magnitude = round_e2m1_(x.clone()).abs_()
    # The exponent and the bit behind it, counted from those of 1/2: from 1 on that is the code.
    codes = (magnitude.view(torch.int32) >> 22).sub_(252)
    codes = torch.maximum(codes, magnitude.ceil_().int())  # of 0 and 1/2: 0 and 1
    return codes.add_((x.view(torch.int32) >> 28) & 8).to(torch.uint8)


def e2m1_values(codes: Tensor) -> Tensor:
    return _looked_up(torch.tensor((*E2M1, *(-value for value in E2M1))), codes)


def _float4_values(codes_RC: Tensor, scales_RG: Tensor, size: int) -> Tensor:
    return e2m1_values(codes_RC).mul_(_widened(scales_RG, codes_RC.shape[1], size))


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    return table.to(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def _group_largest(weight_RC: Tensor, size: int) -> Tensor:
    columns = weight_RC.shape[1]
    padded_RC = torch.nn.functional.pad(weight_RC, (0, -columns % size))
    return largest_magnitude(padded_RC.unflatten(1, (-1, size))).squeeze(-1)


def _widened(scales_RG: Tensor, columns: int, size: int) -> Tensor:
    return scales_RG.repeat_interleave(size, 1)[:, :columns]


def _spread(scales: Tensor, shape: tuple[int, ...], squares: bool) -> Tensor:
    if not squares:
        return scales
    rows, columns = shape
    return scales.repeat_interleave(SQUARE, 0)[:rows].repeat_interleave(SQUARE, 1)[:, :columns]


_CORE_ELEMENTS = 2**17  # half a megabyte in float32


def int8_tokens(x: Tensor) -> Tensor:
    """Round to 8-bit integers with one symmetric scale per token."""

    def round_(wide: Tensor) -> Tensor:
        largest = largest_magnitude(wide)
        scale = fit_range(-largest, largest, 8, symmetric=True, scale_dtype="float32").scale
        return wide.div_(scale).round_().clamp_(-128, 127).mul_(scale)

    return _as_given(x, round_)


def round_tokens(x: Tensor, bits: int, clip: float = 1.0) -> Tensor:
    """Round each token on a symmetric grid of integers, the largest cut to a share of itself."""
    return x if bits == UNROUNDED else fit_share(x, bits, clip).snap(x)


def fp8_tokens(x: Tensor) -> Tensor:
    """Round to 8-bit floats with one scale per token."""
    return _as_given(x, _round_fp8_)


def fp8_token_groups(x: Tensor) -> Tensor:
    """Round to 8-bit floats with one scale per token and 128 columns."""
    return _as_given(x, lambda wide: by_group(wide, SQUARE, _round_fp8_))


def mxfp4_groups(x: Tensor, rule: str) -> Tensor:
    """Round to 4-bit floats in groups of 32 columns under powers of two."""
    return _float4_groups(x, MX_GROUP, lambda largest_G1: mx_scale(largest_G1, rule))


def nvfp4_groups(x: Tensor, scale: Tensor) -> Tensor:
    """Round to 4-bit floats in groups of 16 columns, under the scale of a tensor."""
    return _float4_groups(x, NV_GROUP, lambda largest_G1: nv_scale(largest_G1, scale).div_(scale))


def _float4_groups(x: Tensor, size: int, scale_of: Callable[[Tensor], Tensor]) -> Tensor:
    def round_groups_(x_GK: Tensor) -> Tensor:
        scale_G1 = scale_of(largest_magnitude(x_GK))
        return round_e2m1_(x_GK.div_(scale_G1)).mul_(scale_G1)

    return _as_given(x, lambda wide: by_group(wide, size, round_groups_))


def in_parts(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change activations some tokens at a time, where each token is changed by itself.

    What is computed of a large batch is faulted in anew at every step; a part stays in the cache
    of a core.
    """
    parts = -(-x.numel() // (_CORE_ELEMENTS * torch.get_num_threads()))
    if parts < 2 or x.device.type != "cpu":
        return change(x)
    x_NC = x.reshape(-1, x.shape[-1])
    changed_NC = torch.empty_like(x_NC)
    for part_NC, place_NC in zip(x_NC.chunk(parts), changed_NC.chunk(parts), strict=True):
        place_NC.copy_(change(part_NC))
    return changed_NC.reshape(x.shape)


def by_group(x: Tensor, size: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change full groups of columns at once, then the last one that is smaller."""
    columns = x.shape[-1]
    full = columns - columns % size
    parts = []
    if full:
        parts.append(change(x[..., :full].unflatten(-1, (-1, size))).flatten(-2))
    if full < columns:
        parts.append(change(x[..., full:]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _as_given(x: Tensor, change_: Callable[[Tensor], Tensor]) -> Tensor:
    return change_(x.to(torch.float32, copy=True)).to(x.dtype)


def _round_fp8_(x: Tensor) -> Tensor:
    scale = fp8_scale(largest_magnitude(x))
    return round_e4m3_(x.div_(scale)).mul_(scale)


SCALE_BITS = 16


def round_heads(x: Tensor, kv: str, *, rotated: bool, clip: float = 1.0) -> Tensor:
    """Round keys or values; the last dimension is that of one head."""
    wide = rotate(x.float()) if rotated else x.float()
    if kv == "fp8":
        scale = fp8_scale(wide.abs().amax(-1, keepdim=True)).to(torch.bfloat16).float()
        scale = scale.clamp_(min=SMALLEST_SCALE)
        rounded = e4m3(wide / scale).float().mul_(scale)
    else:
        grid = fit(
            wide, CACHES[kv], symmetric=False, dim=-1, scale_dtype="bf16", shares=(clip, clip)
        )
        rounded = grid.snap(wide)
    return (rotate(rounded) if rotated else rounded).to(x.dtype)


def bits_per_value(kv: str, width: int) -> float:
    """Count the bits of a key or value with its share of the head's scale and zero point."""
    zero = 0 if kv == "fp8" else CACHES[kv]
    return CACHES[kv] + (SCALE_BITS + zero) / width
