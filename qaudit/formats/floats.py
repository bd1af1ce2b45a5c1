"""8-bit floats with a scale for each row, tensor or block of 128 by 128 (`weight_scale_inv`).

And 4-bit floats of groups, as compressed-tensors has them; the experts of gpt-oss are 4-bit floats
in blocks of 32 with an exponent each, columns first.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from qaudit.core.floats import MX_GROUP, NV_GROUP
from qaudit.formats import reading
from qaudit.formats.arithmetic import in_blocks, in_order, power_of_two, scaled, unpack_fp4, wide
from qaudit.support.lazy import Tensor

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
        block = reading.pair_of(
            parts.config.get("weight_block_size") or (128, 128), "weight_block_size"
        )
        down, across = -(-rows // block[0]), -(-columns // block[1])
        because = f"blocks of {block[0]} by {block[1]}"
        parts.sizes({suffix: ("D A", dtypes)}, because, D=down, A=across)

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
        scales = wide(power_of_two(read["_scales"]), parts.name)[..., None]
        return (unpack_fp4(read["_blocks"]) * scales).flatten(2).transpose(1, 2).contiguous()

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
        parts.dtype(".weight_global_scale", "F32")
        if prod(parts.infos[".weight_global_scale"].shape) != 1:
            raise parts.refused("has more than one `weight_global_scale`")

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        scales_RG = read[".weight_scale"]
        if is_nv:
            whole = wide(read[".weight_global_scale"], name).reshape(())
            if not float(whole):
                raise parts.refused("has a `weight_global_scale` of zero")
            scales_RG = wide(scales_RG, name) / whole
        else:
            scales_RG = power_of_two(scales_RG)
        return scaled(name, unpack_fp4(read[".weight_packed"]), scales_RG, in_order(columns, size))

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
