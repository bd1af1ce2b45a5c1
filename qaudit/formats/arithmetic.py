"""Packed bits, scales and zero points -> numbers: what formats share, and how codes are packed.

Codes of 2 to 8 bits are in 32-bit words from the low bits upwards, without gaps: code i begins at
bit i * bits and can go on in the next word. GPTQ, compressed-tensors and MLX pack alike; AWQ
permutes each eight codes first.

8-bit floats have a scale for each row, tensor or block of 128 by 128 (`weight_scale_inv`). 4-bit
floats are in groups, as compressed-tensors has them; the experts of gpt-oss are 4-bit floats in
blocks of 32 with an exponent each, columns first.

Shapes: R output rows, C input columns, G groups of columns; N codes of a row, W words of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

from qaudit.core.floats import MX_GROUP, NV_GROUP, e2m1_values, powers_of
from qaudit.formats import reading
from qaudit.support.lazy import Tensor, torch

WORD = 32


def pack(codes_RN: Tensor, bits: int) -> Tensor:
    """Return the int32 words of unsigned codes; bits behind the last code are zero."""
    rows, count = codes_RN.shape
    padded = torch.nn.functional.pad(codes_RN, (0, -count % WORD)).view(rows, -1, WORD)
    words = torch.zeros(rows, padded.shape[1], bits, dtype=torch.int32)
    for i in range(WORD):
        word, shift = divmod(i * bits, WORD)
        code = padded[..., i].to(torch.int32)
        words[..., word] |= code << shift
        if shift + bits > WORD:
            words[..., word + 1] |= code >> (WORD - shift)
    return words.view(rows, -1)[:, : -(-count * bits // WORD)].contiguous()


def unpack(words_RW: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` codes of each row, as uint8."""
    rows = len(words_RW)
    padded = torch.nn.functional.pad(words_RW, (0, -words_RW.shape[1] % bits)).view(rows, -1, bits)
    codes = torch.empty(rows, padded.shape[1], WORD, dtype=torch.uint8)
    mask = 2**bits - 1
    for i in range(WORD):
        word, shift = divmod(i * bits, WORD)
        code = padded[..., word] >> shift
        if shift + bits > WORD:  # the shift of a negative word brings ones
            low = 2 ** (WORD - shift) - 1
            code = (code & low) | (padded[..., word + 1] << (WORD - shift))
        codes[..., i] = (code & mask).to(torch.uint8)
    return codes.view(rows, -1)[:, :count].contiguous()


def unpack_padded(words_RW: Tensor, bits: int, count: int) -> Tensor:
    """Return codes that never straddle words: the high bits of each word are unused."""
    shifts_K = torch.arange(32 // bits, dtype=torch.int32) * bits
    codes_RWK = (words_RW.view(torch.int32)[..., None] >> shifts_K) & (2**bits - 1)
    codes_RN: Tensor = codes_RWK.reshape(len(words_RW), -1)
    return codes_RN[:, :count].to(torch.uint8)


def halves(packed_RB: Tensor) -> Tensor:
    """Return the two codes of each byte, that of the low half first."""
    packed_RB = packed_RB.view(torch.uint8)
    return torch.stack((packed_RB & 15, packed_RB >> 4), dim=-1).flatten(-2)


def wide(scales: Tensor, name: str) -> Tensor:
    """Return scales in float32; refuse any that are not finite."""
    scales = scales.float()
    if count := int((~torch.isfinite(scales)).sum()):
        what = f"has {count} of {scales.numel()} scales that are not finite numbers"
        raise reading.refused(name, what)
    return scales


def in_order(columns: int, size: int) -> Tensor:
    """Return the group of each column where groups follow one another."""
    return torch.arange(columns) // size


def indexed(name: str, group_of_C: Tensor, groups: int) -> Tensor:
    """Return stored groups of columns; refuse a group that does not exist."""
    lowest, highest = map(int, torch.aminmax(group_of_C))
    if lowest < 0 or highest >= groups:
        wrong = lowest if lowest < 0 else highest
        raise reading.refused(name, f"has a column in group {wrong}, and {groups} groups")
    return group_of_C.long()


def scaled(name: str, centered_RC: Tensor, scales_RG: Tensor, group_of_C: Tensor) -> Tensor:
    """Multiply codes, less their zero points, by the scale of their group, in place.

    A scale of zero is right where every code of its group is zero, and loses them otherwise.
    """
    scales_RG = wide(scales_RG, name)
    if not bool(scales_RG.all()):
        lost_RC = (scales_RG == 0).index_select(1, group_of_C) & (centered_RC != 0)
        if count := int(lost_RC.sum()):
            raise reading.refused(name, f"has scales of zero over {count} codes that are not zero")
    return centered_RC.mul_(scales_RG.index_select(1, group_of_C))


def affine(
    name: str,
    codes_RC: Tensor,
    scales_RG: Tensor,
    group_of_C: Tensor,
    zeros: tuple[Tensor | None, int, str],
) -> Tensor:
    """Return (code - zero point) * scale.

    `zeros` are the stored zero points (R, G), or None where each is in the middle; what the middle
    is; and what of a configuration says that they are there, which is refused where they are not:
    some runtimes leave zero points out, and others subtract them.
    """
    zeros_RG, middle, symmetric = zeros
    centered_RC = codes_RC.float()
    if zeros_RG is None:
        return scaled(name, centered_RC.sub_(middle), scales_RG, group_of_C)
    if symmetric and bool((zeros_RG != middle).any()):
        what = f"the quantization configuration has {symmetric}, and `{name}` zero points"
        raise reading.contradiction(what)
    centered_RC.sub_(zeros_RG.float().index_select(1, group_of_C))
    return scaled(name, centered_RC, scales_RG, group_of_C)


def in_blocks(name: str, weight_RC: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply a weight by the scales of its blocks; those at the ends may be smaller."""
    rows, columns = weight_RC.shape
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = powers_of(scales.view(torch.uint8))
    scales = scales.reshape(-(-rows // block[0]), -(-columns // block[1]))
    scales_RG = scales.index_select(0, in_order(rows, block[0]))
    return scaled(name, weight_RC.float(), scales_RG, in_order(columns, block[1]))


FLOATS = ("F8_E4M3", "F8_E5M2")
_SCALES = (".weight_scale_inv", ".weight_scale")


def _fp8(parts: reading.StoredLinear) -> reading.Layout:
    rows, columns = parts.sizes({".weight": ("R C", FLOATS)}).values()
    suffix = next((name for name in _SCALES if name in parts.infos), "")
    if not suffix:
        raise parts.refused("has no `weight_scale_inv` and no `weight_scale`")
    dtypes = ("F32", "BF16", "F16", "F8_E8M0")
    parts.dtype(suffix, *dtypes)
    shape, block = tuple(parts.infos[suffix].shape), (1, columns)
    if shape in ((), (1,)):
        block = (rows, columns)
    elif shape not in ((rows,), (rows, 1)):
        sides = parts.config.get("weight_block_size") or (128, 128)
        block = reading.pair_of(sides, "weight_block_size")
        parts.blocks({suffix: ("D A", dtypes)}, block, (rows, columns))

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        return in_blocks(parts.name, read[".weight"], read[suffix], block)

    rounding = parts.scaled(rounding_of(parts.config))
    return reading.Layout((rows, columns), 8, decode, rounding=rounding)


def rounding_of(config: reading.Config) -> reading.Rounding | str | None:
    if config.get("quant_method") == "fbgemm_fp8":
        bound = config.get("activation_scale_ub", 1200.0)
        return reading.Rounding("fp8", reading.bound_of(bound, "`activation_scale_ub`"))
    scheme, blocks = config.get("activation_scheme"), config.get("weight_block_size")
    if not scheme:
        return None
    if scheme == "static":
        return reading.Rounding("fp8 fixed")
    if scheme == "dynamic" and not blocks:
        return reading.Rounding("fp8")
    if scheme == "dynamic" and isinstance(blocks, list) and blocks[-1] == 128:
        return reading.Rounding("fp8 by 128")
    return f"fp8, {scheme} scales" + (f" in blocks of {blocks}" if blocks else "")


def _experts(parts: reading.StoredLinear) -> reading.Layout:
    """Return the shape of a model's parameter: experts, columns, rows."""
    stored = {"_blocks": ("E R B N", ("U8",)), "_scales": ("E R B", ("U8",))}
    experts, rows, blocks, nbytes = parts.sizes(stored).values()
    if nbytes != MX_GROUP // 2:
        raise parts.refused(f"has blocks of {nbytes} bytes, where 32 codes take 16")

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        scales = wide(powers_of(read["_scales"].view(torch.uint8)), parts.name)[..., None]
        values = e2m1_values(halves(read["_blocks"]))
        return (values * scales).flatten(2).transpose(1, 2).contiguous()

    return reading.Layout((experts, blocks * MX_GROUP, rows), 4, decode)


def without_zeros(parts: reading.StoredLinear, decode: reading.Decode) -> reading.Decode:
    """Decode floats; refuse zero points beside them, which libraries subtract or leave out."""

    def checked(read: Mapping[str, Tensor]) -> Tensor:
        zeros = read.get(".weight_zero_point")
        if zeros is not None and bool(zeros.float().any()):
            raise parts.refused("has zero points, and is stored as floats, which have none")
        return decode(read)

    return checked


def fp4(parts: reading.StoredLinear, weights: reading.Config) -> reading.Layout:
    """NVFP4 has 8-bit float scales below a scale of the tensor, MXFP4 exponents."""
    name, (rows, nbytes) = parts.name, parts.sizes({".weight_packed": ("R B", ("U8",))}).values()
    columns, is_nv = 2 * nbytes, parts.infos[".weight_scale"].dtype == "F8_E4M3"
    size = NV_GROUP if is_nv else MX_GROUP
    if columns % size:
        raise parts.refused(f"has {columns} columns, which groups of {size} do not fill")
    because = f"groups of {size}"
    parts.sizes({".weight_scale": ("R G", ())}, because, R=rows, G=columns // size)
    parts.group(columns, columns // size, weights)
    if is_nv:
        parts.must_count(".weight_global_scale", 1, "F32")

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        scales_RG = read[".weight_scale"]
        if is_nv:
            whole = wide(read[".weight_global_scale"], name).reshape(())
            if not float(whole):
                raise parts.refused("has a `weight_global_scale` of zero")
            scales_RG = wide(scales_RG, name) / whole
        else:
            scales_RG = powers_of(scales_RG.view(torch.uint8))
        weight_RC = e2m1_values(halves(read[".weight_packed"]))
        return scaled(name, weight_RC, scales_RG, in_order(columns, size))

    return reading.Layout((rows, columns), 4, without_zeros(parts, decode), size)


FP8 = reading.Reader(
    "fp8",
    _SCALES,
    (".weight", *_SCALES, ".activation_scale", ".input_scale"),
    _fp8,
    ignored=(".input_scale_ub",),
    aliases=("fbgemm_fp8",),
    bits=lambda config: 8,
    rounding=rounding_of,
)
MXFP4 = reading.Reader(
    "mxfp4", ("_blocks",), ("_blocks", "_scales"), _experts, dense="", bits=lambda config: 4
)
