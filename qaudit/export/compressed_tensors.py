"""compressed-tensors `pack-quantized`: integers of 2 to 8 bits, in groups or rows.

    weight_packed      int32 (R, words of C codes)
    weight_scale       bf16 (R, G)
    weight_shape       int64 (2,)
    weight_zero_point  int32 (words of R codes, G); absent if symmetric

Words run without gaps, as compressed-tensors 0.18 and later packs them; earlier versions pad
3-bit codes and read other weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from qaudit.checkpoints.quantized.packing import pack, unpack, words_for
from qaudit.core.stored import IntegerCodes, StoredWeight
from qaudit.export.formats import (
    Document,
    Format,
    Read,
    Runtime,
    declared_bits,
    declared_group,
    expect,
    integer_codes,
)

if TYPE_CHECKING:
    from torch import Tensor

FORM = "pack-quantized"


class CompressedTensors(Format):
    """Files that transformers, vLLM and SGLang load through compressed-tensors."""

    name: ClassVar[str] = "compressed-tensors"
    runtimes: ClassVar[tuple[Runtime, ...]] = (
        Runtime(
            "transformers", "5.0", "with compressed-tensors 0.18; zero points: dequantize=True"
        ),
        Runtime("vLLM", "0.33", "2 to 8 bits"),
        Runtime("SGLang", "0.5.23", "4 and 8 bits"),
    )

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        import torch

        codes = integer_codes(linear, stored, self.scheme, self.name)
        tensors = {
            f"{linear}.weight_packed": pack(codes.codes_RC.cpu(), codes.bits),
            f"{linear}.weight_scale": codes.scales_RG.cpu().contiguous(),
            f"{linear}.weight_shape": torch.tensor(codes.codes_RC.shape, dtype=torch.int64),
        }
        if codes.zeros_RG is not None:
            zeros_GR = codes.zeros_RG.cpu().T.contiguous()
            tensors[f"{linear}.weight_zero_point"] = pack(zeros_GR, codes.bits).T.contiguous()
        return tensors

    def unpack(self, linear: str, read: Read, config: Mapping[str, Any]) -> StoredWeight:
        weights = config["config_groups"]["group_0"]["weights"]
        bits, symmetric = int(weights["num_bits"]), bool(weights["symmetric"])
        rows, columns = (int(size) for size in read(f"{linear}.weight_shape").tolist())
        packed, scales_RG = read(f"{linear}.weight_packed"), read(f"{linear}.weight_scale")
        group = int(weights["group_size"]) if weights["strategy"] == "group" else columns
        groups = -(-columns // max(group, 1))
        expect(
            tuple(packed.shape) == (rows, words_for(columns, bits)),
            linear,
            f"`weight_packed` is {list(packed.shape)}, and {bits} bits of {rows} x {columns} need "
            f"{[rows, words_for(columns, bits)]}",
        )
        expect(
            tuple(scales_RG.shape) == (rows, groups),
            linear,
            f"`weight_scale` is {list(scales_RG.shape)} and its groups need {[rows, groups]}",
        )
        zeros_RG = None
        if not symmetric:
            zeros = read(f"{linear}.weight_zero_point")
            expect(
                tuple(zeros.shape) == (words_for(rows, bits), groups),
                linear,
                f"`weight_zero_point` is {list(zeros.shape)}",
            )
            zeros_RG = unpack(zeros.T.contiguous(), bits, rows).T.contiguous()
        return IntegerCodes(unpack(packed, bits, columns), scales_RG, zeros_RG, bits, group)

    def config(self, unquantized: tuple[str, ...], *, symmetric: bool) -> Document:
        group = declared_group(self.scheme)
        weights: Document = {
            "num_bits": declared_bits(self.scheme),
            "type": "int",
            "symmetric": symmetric,
            "strategy": "channel" if group == -1 else "group",
            "dynamic": False,
        }
        if group != -1:
            weights["group_size"] = group
        linears = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": FORM,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": FORM,
            "quantization_status": "compressed",
            "config_groups": {"group_0": linears},
            "ignore": list(unquantized),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }
