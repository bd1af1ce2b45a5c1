"""8-bit floats with a scale for each row, tensor or block of 128 by 128 (`weight_scale_inv`).

And the experts of gpt-oss: 4-bit floats in blocks of 32 with an exponent each, columns first.
"""

from __future__ import annotations

from collections.abc import Mapping

from qaudit.formats.activations import Rounding
from qaudit.formats.arithmetic import in_blocks, power_of_two, unpack_fp4, wide
from qaudit.formats.reading import Config, Layout, Reader, StoredLinear, bound_of, pair_of
from qaudit.support.lazy import Tensor

FLOATS = ("F8_E4M3", "F8_E5M2")
_SCALES = (".weight_scale_inv", ".weight_scale")
_MX_BLOCK = 32


def _fp8(parts: StoredLinear) -> Layout:
    rows, columns = parts.sizes({".weight": ("R C", FLOATS)}).values()
    suffix = next((one for one in _SCALES if one in parts.infos), "")
    if not suffix:
        raise parts.refused("has no `weight_scale_inv` and no `weight_scale`")
    dtypes = ("F32", "BF16", "F16", "F8_E8M0")
    parts.dtype(suffix, *dtypes)
    shape, block = tuple(parts.infos[suffix].shape), (1, columns)
    if shape in ((), (1,)):
        block = (rows, columns)
    elif shape not in ((rows,), (rows, 1)):
        block = pair_of(parts.config.get("weight_block_size") or (128, 128), "weight_block_size")
        down, across = -(-rows // block[0]), -(-columns // block[1])
        because = f"blocks of {block[0]} by {block[1]}"
        parts.sizes({suffix: ("D A", dtypes)}, because, D=down, A=across)

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        return in_blocks(parts.name, read[".weight"], read[suffix], block)

    rounding = parts.scaled(rounding_of(parts.config))
    return Layout((rows, columns), 8, decode, rounding=rounding)


def rounding_of(config: Config) -> Rounding | str | None:
    if config.get("quant_method") == "fbgemm_fp8":
        bound = config.get("activation_scale_ub", 1200.0)
        return Rounding("fp8", bound_of(bound, "`activation_scale_ub`"))
    scheme, blocks = config.get("activation_scheme"), config.get("weight_block_size")
    if not scheme:
        return None
    if scheme == "static":
        return Rounding("fp8 fixed")
    if scheme == "dynamic" and not blocks:
        return Rounding("fp8")
    if scheme == "dynamic" and isinstance(blocks, list) and blocks[-1] == 128:
        return Rounding("fp8 by 128")
    return f"fp8, {scheme} scales" + (f" in blocks of {blocks}" if blocks else "")


def _experts(parts: StoredLinear) -> Layout:
    """Return the shape of a model's parameter: experts, columns, rows."""
    stored = {"_blocks": ("E R B N", ("U8",)), "_scales": ("E R B", ("U8",))}
    experts, rows, blocks, nbytes = parts.sizes(stored).values()
    if nbytes != _MX_BLOCK // 2:
        raise parts.refused(f"has blocks of {nbytes} bytes, where 32 codes take 16")

    def decode(read: Mapping[str, Tensor]) -> Tensor:
        scales = wide(power_of_two(read["_scales"]), parts.name)[..., None]
        return (unpack_fp4(read["_blocks"]) * scales).flatten(2).transpose(1, 2).contiguous()

    return Layout((experts, blocks * _MX_BLOCK, rows), 4, decode)


FP8 = Reader(
    "fp8",
    _SCALES,
    (".weight", *_SCALES, ".activation_scale", ".input_scale"),
    _fp8,
    ignored=(".input_scale_ub",),
    aliases=("fbgemm_fp8",),
    bits=lambda config: 8,
    rounding=rounding_of,
)
MXFP4 = Reader(
    "mxfp4", ("_blocks",), ("_blocks", "_scales"), _experts, dense="", bits=lambda config: 4
)
