"""8-bit floats with a scale for each row, tensor or block of 128 by 128 (`weight_scale_inv`).

And the experts of gpt-oss: 4-bit floats in blocks of 32 with an exponent each, columns first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from qaudit.formats.activations import Rounding
from qaudit.formats.arithmetic import in_order, power_of_two, scaled, unpack_fp4, wide
from qaudit.formats.reading import Config, Layout, Reader, StoredLinear, contradiction
from qaudit.support.lazy import Tensor, torch

FLOATS = ("F8_E4M3", "F8_E5M2")
_SCALES = (".weight_scale_inv", ".weight_scale")
_MX_BLOCK = 32


def _fp8(parts: StoredLinear) -> Layout:
    parts.must_hold(".weight", *FLOATS)
    rows, columns = parts.shape(".weight", 2)
    suffix = next((one for one in _SCALES if one in parts.infos), _SCALES[0])
    if suffix not in parts.infos:
        raise parts.refused("has no `weight_scale_inv` and no `weight_scale`")
    parts.must_hold(suffix, "F32", "BF16", "F16", "F8_E8M0")
    decode = partial(from_floats, parts.name, _block(parts, suffix), (".weight", suffix))
    rounding = rounding_of(parts.config)
    known = parts.scaled(rounding) if isinstance(rounding, Rounding) else None
    return Layout((rows, columns), 8, decode, rounding=known)


def rounding_of(config: Config) -> Rounding | str | None:
    if config.get("quant_method") == "fbgemm_fp8":
        bound = config.get("activation_scale_ub", 1200.0)
        if not isinstance(bound, int | float) or not 0 < bound < float("inf"):
            raise contradiction(f"`activation_scale_ub` is `{str(bound)[:40]}`, which is no bound")
        return Rounding("fp8", float(bound))
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


def _block(parts: StoredLinear, suffix: str) -> tuple[int, int]:
    rows, columns = parts.shape(".weight", 2)
    shape = tuple(parts.infos[suffix].shape)
    if shape in ((), (1,)):
        return rows, columns
    if shape in ((rows,), (rows, 1)):
        return 1, columns
    size = parts.config.get("weight_block_size") or (128, 128)
    if (
        not isinstance(size, list | tuple)
        or len(size) != 2
        or not all(isinstance(one, int) and one > 0 for one in size)
    ):
        raise contradiction(f"`weight_block_size` is `{str(size)[:40]}`, which is no pair of sizes")
    needed = (-(-rows // size[0]), -(-columns // size[1]))
    parts.must_be(suffix, needed, f"blocks of {size[0]} by {size[1]}")
    return int(size[0]), int(size[1])


def from_floats(
    name: str, block: tuple[int, int], keys: tuple[str, str], read: Mapping[str, Tensor]
) -> Tensor:
    weight, scales = (read[key] for key in keys)
    return in_blocks(name, weight.float(), scales, block)


def in_blocks(name: str, weight_RC: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply a weight by the scales of its blocks; those at the ends may be smaller."""
    rows, columns = weight_RC.shape
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = power_of_two(scales)
    scales = scales.reshape(-(-rows // block[0]), -(-columns // block[1]))
    scales_RG = scales.index_select(0, in_order(rows, block[0]))
    return scaled(name, weight_RC, scales_RG, in_order(columns, block[1]))


def _experts(parts: StoredLinear) -> Layout:
    """Return the shape of a model's parameter: experts, columns, rows."""
    parts.must_hold("_blocks", "U8")
    parts.must_hold("_scales", "U8")
    experts, rows, blocks, nbytes = parts.shape("_blocks", 4)
    parts.must_be("_scales", (experts, rows, blocks), "`blocks`")
    if nbytes != _MX_BLOCK // 2:
        raise parts.refused(f"has blocks of {nbytes} bytes, where 32 codes take 16")
    return Layout((experts, blocks * _MX_BLOCK, rows), 4, partial(_decode_experts, parts.name))


def _decode_experts(name: str, read: Mapping[str, Tensor]) -> Tensor:
    scales = wide(power_of_two(read["_scales"]), name)
    return (unpack_fp4(read["_blocks"]) * scales[..., None]).flatten(2).transpose(1, 2).contiguous()


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
