"""Linears as torchao 0.18 flattens them into safetensors, written by hand from its layout."""

import json

import torch

from qaudit.formats.packing import further_readers

INSTALLED = "torchao" in further_readers()
KINDS = ("float8", "fp8 by token", "int8", "int8 by token", "int4", "intx", "int8 asymmetric")
_TYPES = {"fp8 by token": "Float8Tensor", "float8": "Float8Tensor", "int4": "Int4Tensor",
          "int8": "Int8Tensor", "int8 by token": "Int8Tensor"}  # fmt: skip


def named(kind, value):
    return {"_type": kind, "_data": value}


PER_ROW = named("PerRow", {"dim": -1})
E4M3 = named("torch.dtype", "float8_e4m3fn")
SYMMETRIC = named("MappingType", "SYMMETRIC")


def tensors(kind, one, name):
    """Return the parts of a linear: codes around zero, with a zero point where there are some."""
    half = 2 ** (one.bits - 1)
    codes_RC, zeros_RG = one.codes_RC - half, one.zeros_RG - half
    if kind in ("float8", "fp8 by token"):
        parts = {"qdata": codes_RC.to(torch.float8_e4m3fn), "scale": one.scales_RG}
    elif kind == "int4":
        low, high = codes_RC[:, ::2] & 15, codes_RC[:, 1::2] & 15
        scales_GR, codes = one.scales_RG.T, (low | high << 4).to(torch.uint8).view(torch.int8)
        parts = {"qdata": codes, "scale": scales_GR, "zero_point": -zeros_RG.T * scales_GR}
    else:
        zeros_RG = zeros_RG.to(torch.int8)
        parts = {"qdata": codes_RC.to(torch.int8), "scale": one.scales_RG, "zero_point": zeros_RG}
    return {f"{name}._weight_{part}": tensor.contiguous() for part, tensor in parts.items()}


def description(kind, one):
    """Return what the header holds under the dense name, before it is text."""
    data = {"block_size": [1, one.size]}
    if kind == "int4":
        data |= {"shape": list(one.codes_RC.shape), "activation_dtype": None}
    elif kind in ("intx", "int8 asymmetric"):
        asymmetric = "int8_asym_per_token" if kind == "int8 asymmetric" else None
        dtype = named("torch.dtype", f"int{one.bits}")
        data |= {"target_dtype": dtype, "activation_quantization": asymmetric}
    else:
        data["act_quant_kwargs"] = {
            "fp8 by token": named(
                "QuantizeTensorToFloat8Kwargs", {"float8_dtype": E4M3, "granularity": PER_ROW}
            ),
            "int8 by token": named(
                "QuantizeTensorToInt8Kwargs", {"mapping_type": SYMMETRIC, "granularity": PER_ROW}
            ),
        }.get(kind)
    parts = [key.rpartition("_weight_")[2] for key in tensors(kind, one, "a")]
    kind = _TYPES.get(kind, "IntxUnpackedToInt8Tensor")
    return {**named(kind, data), "_tensor_data_names": parts}


def described(kind, one):
    return json.dumps(description(kind, one))


def config(kind, bits):
    """Return the quantization configuration that transformers writes."""
    dtype = named("torch.dtype", f"int{bits}")
    name, data = {
        "float8": ("Float8WeightOnlyConfig", {}),
        "fp8 by token": (
            "Float8DynamicActivationFloat8WeightConfig",
            {"activation_dtype": E4M3, "granularity": [PER_ROW, PER_ROW]},
        ),
        "int8": ("Int8WeightOnlyConfig", {}),
        "int8 by token": (
            "Int8DynamicActivationInt8WeightConfig",
            {"act_mapping_type": SYMMETRIC, "granularity": PER_ROW},
        ),
        "int4": ("Int4WeightOnlyConfig", {}),
        "intx": ("IntxWeightOnlyConfig", {"weight_dtype": dtype}),
        "int8 asymmetric": ("Int8DynamicActivationIntxWeightConfig", {"weight_dtype": dtype}),
    }[kind]
    kind = {"default": {**named(name, data), "_version": 2}}
    return {"quant_method": "torchao", "quant_type": kind}
