"""Quantized repositories become the dense weights that their bits mean, and nothing else.

A row of `SAMPLES` is one way to store a linear, with the weight that it means: whoever adds one
inherits the tests of reading, of missing parts and of damage.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import safetensors.torch
import torch
from bitsandbytes import functional
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qaudit.errors import ConfigurationError, QauditError, SourceError
from qaudit.formats.weights import QuantizedFolder, quantization_of
from tests.support import torchao
from tests.support.damage import ODD, damaged
from tests.support.quantized import (
    Affine,
    awq_tensors,
    ct_config,
    ct_tensors,
    gptq_tensors,
    mlx_tensors,
    padded_words,
    write,
)

NAME, EXPERTS = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.experts.down_proj"
E4M3, NAN = torch.float8_e4m3fn, float("nan")
Tensors = dict[str, Tensor]


@dataclass
class Sample:
    """The stored tensors of one linear, its configuration, and what they mean."""

    tensors: Tensors
    config: dict[str, Any] | None
    weight: Tensor | None  # None: told in the tests of a plug-in
    bits: int
    name: str = NAME
    metadata: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # further ones, as JSON
    quantization: dict[str, Any] | None = None  # under the key of MLX
    within: float = 0.0  # of itself

    @property
    def dense(self):
        return self.name if self.name == EXPERTS else f"{self.name}.weight"

    def written(self, folder):
        more = {"quantization": self.quantization} if self.quantization else {}
        write(folder, self.tensors or {"a": torch.ones(1)}, self.config, self.metadata, **more)
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        return folder


def read(folder, name=f"{NAME}.weight"):
    return QuantizedFolder(folder).read(name)


# ----------------------------------------------------------------- samples: integers, by definition


@cache
def _made(kind):
    return SAMPLES[kind]()


def sample_of(kind):
    """Return a sample that may be changed; making it takes longest."""
    return copy.deepcopy(_made(kind))


def affine(bits=4, *, symmetric=False, columns=64, size=32):
    one = Affine(bits, 32, columns, bits, size)
    if symmetric:
        one.zeros_RG.fill_(2 ** (bits - 1))
    return one


def gptq(bits = 4, version = 1, *, symmetric = False, index = True,
         size = 32, **own):  # fmt: skip
    one = affine(bits, symmetric=symmetric, size=size)
    if own.get("desc_act"):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
        one.group_of_C = one.group_of_C[order]
    tensors = gptq_tensors(one, NAME, first=version == 1, index=index)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, **own}
    config |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    return Sample(tensors, config, one.weight(), bits)


def awq(*, symmetric=False, zeros=True):
    one = affine(symmetric=symmetric)
    tensors = awq_tensors(one, NAME)
    if not zeros:
        del tensors[f"{NAME}.qzeros"]
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    return Sample(tensors, {**config, "zero_point": not symmetric}, one.weight(), 4)


OLDER_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


def older(sample, file, config):
    """Have the configuration in a file of its own."""
    sample.config, sample.files = None, {file: config}
    return sample


def packed(bits=4, *, symmetric=False, **how):
    one = affine(bits, symmetric=symmetric)
    tensors = ct_tensors(one, NAME, symmetric=symmetric, **how)
    arguments = {"num_bits": bits, "symmetric": symmetric, "strategy": "group", "group_size": 32}
    return Sample(tensors, ct_config(arguments), one.weight(), bits)


def whole_bytes():
    one = affine(8, size=64)
    codes_RC = (one.codes_RC - 128).to(torch.int8)
    tensors = {f"{NAME}.weight": codes_RC, f"{NAME}.weight_scale": one.scales_RG}
    weight = codes_RC.float() * one.scales_RG
    return Sample(tensors, ct_config({"num_bits": 8}, "int-quantized"), weight, 8)


def mlx(bits=4):
    one = affine(bits)
    config = {"mode": "affine", "group_size": 32, "bits": bits}
    # One rounding of code times scale, and one of adding the bias: half a unit each.
    return Sample(mlx_tensors(one, NAME), config, one.weight(), bits, within=1e-6)


# ------------------------------------------------------------------------------ samples: floats


def fp8(*shape):
    """8-bit floats, whose scales are of a tensor, of rows or of blocks."""
    codes = torch.randn(48, 80, generator=torch.Generator().manual_seed(0)).to(E4M3)
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    weight = torch.empty(48, 80)
    for r in range(48):
        for c in range(80):
            place = {(1,): 0, (48, 1): (r, 0), (2, 3): (r // 32, c // 32)}[shape]
            weight[r, c] = codes[r, c].float() * scales[place]
    tensors = {f"{NAME}.weight": codes, f"{NAME}.weight_scale_inv": scales}
    return Sample(tensors, {"quant_method": "fp8", "weight_block_size": [32, 32]}, weight, 8)


def fp8_of_rows(config, **more):
    codes = affine().codes_RC.to(E4M3)
    scales = torch.linspace(0.5, 2, 32)[:, None]
    tensors = {f"{NAME}.weight": codes, f"{NAME}.weight_scale": scales}
    tensors |= {f"{NAME}.{name}": tensor for name, tensor in more.items()}
    return Sample(tensors, config, codes.float() * scales, 8)


FP4 = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}


def four_bit_floats(*shape):
    """Return random pairs of codes, and the numbers that they mean."""
    pairs = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    codes = torch.stack([pairs % 16, pairs // 16], -1).flatten(-2)
    values = [FP4[code % 8] * (-1 if code > 7 else 1) for code in codes.flatten().tolist()]
    return pairs.to(torch.uint8), torch.tensor(values).reshape(codes.shape)


def nvfp4():
    pairs, values = four_bit_floats(4, 32)
    scales = torch.linspace(1, 100, 16).reshape(4, 4).to(E4M3)
    tensors = {"weight_packed": pairs, "weight_scale": scales,
               "weight_global_scale": torch.tensor([2688.0]),
               "input_global_scale": torch.tensor([3.0])}  # fmt: skip
    own = {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
    config = ct_config({**own, "group_size": 16}, "nvfp4-pack-quantized")
    config["config_groups"]["group_0"]["input_activations"] = {**own, "dynamic": "local"}
    weight = values * (scales.float() / 2688.0).repeat_interleave(16, 1)
    return Sample({f"{NAME}.{name}": one for name, one in tensors.items()}, config, weight, 4)


def mxfp4():
    pairs, values = four_bit_floats(4, 32)
    scales = torch.arange(118, 126, dtype=torch.uint8).reshape(4, 2)
    tensors = {f"{NAME}.weight_packed": pairs, f"{NAME}.weight_scale": scales}
    arguments = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    weight = values * (2.0 ** (scales.float() - 127)).repeat_interleave(32, 1)
    return Sample(tensors, ct_config(arguments, "mxfp4-pack-quantized"), weight, 4)


def experts():
    """Those of gpt-oss, which have their columns first."""
    pairs, values = four_bit_floats(2, 6, 3, 16)
    scales = torch.arange(100, 136, dtype=torch.uint8).reshape(2, 6, 3)
    tensors = {f"{EXPERTS}_blocks": pairs, f"{EXPERTS}_scales": scales}
    dense = values.flatten(2) * (2.0 ** (scales.float() - 127)).repeat_interleave(32, 2)
    return Sample(tensors, {"quant_method": "mxfp4"}, dense.transpose(1, 2), 4, EXPERTS)


# ---------------------------------------------------------------------- samples of a library's own


def bnb(kind, *, nested=False, dtype=torch.float32):
    # Whole blocks in a row: others the library's CPU kernel scales by the wrong block.
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    stored = {f"{NAME}.weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    means = functional.dequantize_4bit(codes, state)
    return Sample({f"{NAME}.weight": codes, **stored}, config, means, 4)


def bnb_int8():
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    scale = weight.abs().amax(1)
    codes = torch.round(weight / scale[:, None] * 127).to(torch.int8)
    tensors = {f"{NAME}.weight": codes, f"{NAME}.SCB": scale}
    tensors[f"{NAME}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    # The library multiplies by a rounded 1/127 first or last, depending on its version.
    means = functional.int8_vectorwise_dequant(codes, scale)
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return Sample(tensors, config, means, 8, within=3e-7)


def of_torchao(kind):
    one = affine(8 if kind.startswith("int8") else 4)
    metadata = {f"{NAME}.weight": torchao.described(kind, one)}
    config = torchao.config(kind, one.bits)
    return Sample(torchao.tensors(kind, one, NAME), config, None, one.bits, metadata=metadata)


_GPTQ_FILE = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
_FLOATS = ct_config({"num_bits": 8, "type": "float"}, "float-quantized")

SAMPLES = {
    "gptq": gptq, "awq": awq, "packed": packed, "mlx": mlx,
    **{f"gptq {bits}, version {v}": partial(gptq, bits, v) for bits in (2, 3, 8) for v in (1, 2)},
    **{f"gptq {bits}, version {v}, symmetric": partial(gptq, bits, v, symmetric=True, sym=True)
       for bits in (2, 3, 4, 8) for v in (1, 2)},
    "gptq, symmetric but for a rule":
        partial(gptq, sym=True, dynamic={"+:.*down_proj": {"sym": False}}),
    "gptq, columns in any order": partial(gptq, desc_act=True),
    "gptq, a wide group": partial(gptq, size=64, group_size=128),
    "gptq without an index": partial(gptq, symmetric=True, index=False),
    "older gptq": lambda: older(
        gptq(symmetric=True, index=False), "quantize_config.json", _GPTQ_FILE),
    "awq, symmetric": partial(awq, symmetric=True),
    "awq without zero points": partial(awq, symmetric=True, zeros=False),
    "older awq": lambda: older(awq(), "quant_config.json", OLDER_AWQ),
    **{f"packed {bits}": partial(packed, bits) for bits in (2, 3, 5, 6, 7, 8)},
    **{f"packed {bits}, symmetric": partial(packed, bits, symmetric=True) for bits in range(2, 9)},
    **{f"packed {bits}, padded": partial(packed, bits, pack=padded_words) for bits in (3, 5, 6)},
    "whole bytes": whole_bytes,
    **{f"mlx {bits}": partial(mlx, bits) for bits in (2, 3, 6, 8)},
    "fp8": partial(fp8, 1), "fp8 of rows": partial(fp8, 48, 1), "fp8 of blocks": partial(fp8, 2, 3),
    "fp8, fixed": lambda: fp8_of_rows(dict(_STATIC), input_scale=torch.ones(1)),
    "fp8 of compressed-tensors": lambda: fp8_of_rows(json.loads(json.dumps(_FLOATS))),
    "nvfp4": nvfp4, "mxfp4": mxfp4, "experts": experts,
    **{f"bnb {kind}{', nested' * nested}, {dtype}": partial(bnb, kind, nested=nested, dtype=dtype)
       for kind in ("nf4", "fp4") for nested in (False, True)
       for dtype in (torch.float32, torch.bfloat16)},
    "bnb nf4": partial(bnb, "nf4"), "bnb int8": bnb_int8,
    **{f"torchao {kind}": partial(of_torchao, kind) for kind in torchao.KINDS if torchao.INSTALLED},
}  # fmt: skip


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_sample_is_read_as_what_its_bits_mean(kind, tmp_path):
    sample = sample_of(kind)
    weights = QuantizedFolder(sample.written(tmp_path))
    assert weights.names() == [sample.dense]
    found = weights.read(sample.dense)
    assert bool(torch.isfinite(found).all())
    if sample.weight is not None:
        assert (weights.bits, found.shape) == (sample.bits, sample.weight.shape)
        assert torch.allclose(found, sample.weight, rtol=sample.within, atol=sample.within)
    if kind == "gptq":
        assert not weights.decoded_notes  # of activations, which it does not round


def test_older_configurations_are_found_and_refused_where_they_differ(tmp_path):
    """Of these files GPTQModel reads the older one, and vLLM `config.json`."""
    assert quantization_of(SAMPLES["older awq"]().written(tmp_path / "a")) == ("awq", OLDER_AWQ)
    sample, other = mlx(), Affine(10, 24, 64, 4, 32)
    sample.tensors |= mlx_tensors(other, "model.embed_tokens")
    embedded = read(sample.written(tmp_path / "b"), "model.embed_tokens.weight")
    assert torch.allclose(embedded, other.weight(), rtol=1e-6, atol=1e-6)
    one, same = gptq(sym=False, checkpoint_format="gptq"), {**_GPTQ_FILE, "sym": False}
    same["checkpoint_format"] = "gptq"
    for sample, file, table, change, match in (
        *((one, "quantize_config.json", same, change, match) for change, match in (
            ({"bits": 8}, r"`quantize_config\.json` has `bits: 8`, and `config\.json` `bits: 4`"),
            ({"group_size": 64}, "has `group_size: 64`"),
            ({"desc_act": True}, "has `desc_act: True`"),
            ({"checkpoint_format": "gptq_v2"}, "has `checkpoint_format: gptq_v2`"),
            ({"sym": True}, "has `sym: True`"),
        )),
        (awq(), "quant_config.json", OLDER_AWQ, {"q_group_size": 64},
         r"`quant_config\.json` has `group_size: 64`"),
    ):  # fmt: skip
        sample.files = {file: table}
        assert torch.equal(read(sample.written(tmp_path / file)), sample.weight)
        sample.files = {file: {**table, **change}}
        with pytest.raises(ConfigurationError, match=match):
            read(sample.written(tmp_path / file))
    both = mlx()
    both.quantization = dict(both.config)
    read(both.written(tmp_path / "mlx"))
    both.config["bits"] = 2
    with pytest.raises(SourceError, match="of MLX differ"):
        read(both.written(tmp_path / "mlx"))


# -------------------------------------------------------------------------------- bad input


def scaled(value):
    return lambda t: torch.full(t.shape, value).to(t.dtype)


def gone(_):
    return None


BEYOND = torch.tensor([[0.0], [1.0], *[[0.0]] * 30])

REFUSED = {
    "gptq": [
        ({"bits": 3}, "has 3 bits, and .* is stored in 4"),
        ({"group_size": 64}, "groups of 64 columns, and .* groups of 32"),
        ({"checkpoint_format": "marlin"}, "`marlin` of GPTQ is not known"),
        ({"bits": "four"}, "`bits` of the quantization configuration is `four`"),
        ({"quant_method": "quip"}, "the format `quip`"),
        ({"quant_method": "awq", "version": "gemv"}, "layout `gemv` is not read"),
        ({"quant_method": "bitsandbytes"}, "holds no linear of it"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "stored sparse"),
        ({"dynamic": {"-:.*down_proj": {}}}, "`dynamic` leaves"),
        ((".scales", lambda t: t[:, :-1]), r"`qweight` needs \[2, 32\]"),
        ((".scales", scaled(float("inf"))), "NaN or infinity"),
        ((".scales", scaled(0)), "scales of zero over"),
        ((".scales", gone), "has no `scales`"),
        ((".g_idx", lambda t: t + 1), "a column in group 2, and 2 groups"),
        ((".g_idx", lambda t: t[:-1]), r"`g_idx` of shape \[63\]"),
        ((".qzeros", lambda t: t[:, :-1]), "packs 32 zero points in 3 words"),
        ((".qzeros", gone), "has no `qzeros`"),
        ((".qweight", lambda t: t.float()), "stored as `F32`"),
    ],
    "gptq, columns in any order": [
        ({"desc_act": False}, "has `desc_act: false`, and the `g_idx` of"),
        ((".g_idx", gone), "has no `g_idx`"),
    ],
    "gptq 3, version 1": [({"sym": True}, f"has `sym: true`, and `{NAME}.weight` zero poi")],
    "gptq 8, version 2": [({"sym": True}, f"has `sym: true`, and `{NAME}.weight` zero poi")],
    "awq": [
        ({"modules_to_not_convert": ["down_proj"]}, "`modules_to_not_convert` names"),
        ({"zero_point": False}, r"has `zero_point: false`, and `.*` zero points"),
    ],
    "packed": [
        ({"symmetric": True}, "has `symmetric: true`, and .* zero points"),
        ({"ignore": ["lm_head", NAME]}, f"`ignore` names `{NAME}`"),
        ({"ignore": ["re:.*down_proj"]}, f"`ignore` names `{NAME}`"),
        ({"ignore": ["re:(a+)+b"]}, "could take hours"),
        ({"ignore": ["re:("]}, "is no pattern"),
        ({"targets": ["re:.*k_proj"]}, "has `targets` for"),
        ({"targets": []}, "has `targets` for"),
        ({"actorder": "group"}, "has no `weight_g_idx`"),
    ],
    "whole bytes": [({"num_bits": 4}, r"has 4 bits, and .* is stored in 8")],
    "mlx": [({NAME: False}, "the configuration denies it")],
    "fp8": [({"ignored_layers": [NAME]}, "`ignored_layers` names")],
    "fp8 of blocks": [({"weight_block_size": 96}, "`weight_block_size` is `96`, which is no pair")],
    "fp8 of compressed-tensors": [
        ({"format": "dense"}, "has `dense`, and .* `float-quant"),
        ((".weight_zero_point", lambda _: BEYOND), "has zero points, and is stored as floats"),
    ],
    "bnb int8": [
        ({"llm_int8_skip_modules": ["down_proj"]}, "`llm_int8_skip_modules` names"),
        ({"load_in_8bit": False}, "stored in 8 bits, and .* no `load_in_8bit` alone"),
    ],
    "bnb nf4": [
        ({"load_in_8bit": True}, "stored in 4 bits, and .* no `load_in_4bit` alone"),
        ((".weight.quant_map", lambda t: t[:, None]), r"a `weight.quant_map` of shape \[16, 1\]"),
        ((".weight.quant_map", lambda t: t / 2), "`quant_map` that is not the one of `nf4`"),
    ],
    "nvfp4": [
        ({"group_size": 32}, "groups of 32 columns, and .* groups of 16"),
        ({"type": "int"}, "has `int`, and .* is stored as `float`"),
        ({"num_bits": 8}, "has 8 bits, and .* is stored in 4"),
        ({"format": "mxfp4-pack-quantized"}, "`mxfp4-pack.*stored as `nvfp4-pack"),
        ((".weight_scale", lambda t: t[:, :-1]), r"groups of 16 needs \[4, 4\]"),
        ((".weight_scale", lambda t: t.float()), "stored as `F32`"),
        ((".weight_scale", scaled(NAN)), "NaN or infinity"),
        ((".weight_scale", scaled(0)), "scales of zero over"),
        ((".weight_scale", gone), "has no `weight_scale`"),
        ((".weight_scale", lambda t: t.view(torch.uint8)), "`nvfp4-pack.*`mxfp4-pack"),
        ((".weight_global_scale", gone), "has no `weight_global_scale`"),
        ((".weight_global_scale", lambda t: t * 0), "`weight_global_scale` of zero"),
        ((".weight_global_scale", lambda t: t * NAN), "holds NaN or infinity"),
        ((".weight_global_scale", lambda t: t.half()), "stored as `F16`"),
        ((".weight_global_scale", lambda _: torch.ones(4)), "`weight_global_scale` of 4 numbers"),
        ((".weight_packed", lambda t: t[:, :-1]), "62 columns, which groups of 16"),
        ((".weight_packed", lambda t: t.view(torch.int32)), "`nvfp4-.*`pack-quantized`"),
        ((".input_global_scale", gone), "has no `input_global_scale`"),
        ((".input_global_scale", lambda t: t * NAN), "which is no scale"),
        ((".input_global_scale", torch.neg), "which is no scale"),
        ((".weight_zero_point", lambda _: BEYOND[:4]), "has zero points, and is stored as floats"),
    ],
    "mxfp4": [
        ({"group_size": 16}, "groups of 16 columns, and .* groups of 32"),
        ({"format": "nvfp4-pack-quantized"}, "`nvfp4-pack.*stored as `mxfp4-pack"),
        ((".weight_scale", lambda t: t.fill_(255)), "scales that are not finite"),
        ((".weight_scale", lambda t: t[:, :1]), r"groups of 32 needs \[4, 2\]"),
        ((".weight_scale", lambda t: t.to(torch.int8)), "stored as `I8`"),
        ((".weight_scale", gone), "has no `weight_scale`"),
    ],
    "experts": [
        ({"modules_to_not_convert": [EXPERTS]}, "`modules_to_not_convert` names"),
        ({"modules_to_not_convert": ["model.layers.0"]}, "`modules_to_not_convert` names"),
        (("_scales", lambda t: t.fill_(255)), "scales that are not finite"),
        (("_scales", lambda t: t[:, :-1]), r"`blocks` needs \[2, 6, 3\]"),
        (("_scales", lambda t: t.to(torch.int16)), "stored as `I16`"),
        (("_scales", gone), "has no `scales`"),
        (("_blocks", lambda t: t[..., :8]), "blocks of 8 bytes"),
        (("_blocks", lambda t: t.flatten(2)), "where 4 dimensions are needed"),
        (("_blocks", gone), "holds no linear of it"),
    ],
}


def changed(sample, change):
    """Change keys of a configuration, wherever they are, or one tensor."""
    if isinstance(change, dict):
        group = next(iter(sample.config.get("config_groups", {}).values()), {})
        for key, value in change.items():
            inner = key in ("group_size", "type", "num_bits", "symmetric", "actorder")
            place = group if group and key == "targets" else sample.config
            (group["weights"] if group and inner else place)[key] = value
    else:
        suffix, function = change
        new = function(sample.tensors.pop(sample.name + suffix, torch.ones(1)))
        sample.tensors |= {} if new is None else {sample.name + suffix: new}
    return sample


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [(kind, change, match) for kind, rows in REFUSED.items() for change, match in rows],
)
def test_what_does_not_fit_is_refused(kind, change, match, tmp_path):
    folder = changed(sample_of(kind), change).written(tmp_path)
    with pytest.raises(SourceError, match=match) as info:
        weights = QuantizedFolder(folder)
        for name in weights.names():
            weights.read(name)
    assert info.value.hint
    contradicts = isinstance(change, dict) and "has no" not in match
    assert not contradicts or isinstance(info.value, ConfigurationError)


def test_what_fits_is_read_a_single_file_first_and_without_biases_of_zeros(tmp_path):
    sample = gptq()
    folder = sample.written(tmp_path)
    stored = {name: tensor.contiguous() for name, tensor in gptq(8).tensors.items()}
    safetensors.torch.save_file(stored, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(stored, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(read(folder), sample.weight)
    (note,) = QuantizedFolder(folder).notes
    assert "model-00001-of-00001.safetensors" in note
    with pytest.raises(SourceError, match="no quantization configuration"):
        QuantizedFolder(write(tmp_path / "plain", {"a": torch.ones(2)}, None, model_type="llama"))
    sample.tensors[f"{NAME}.bias"] = torch.zeros(32)
    folder = sample.written(tmp_path / "biased")
    assert QuantizedFolder(folder, base=[f"{NAME}.weight"]).names() == [f"{NAME}.weight"]
    assert len(QuantizedFolder(folder, base=[f"{NAME}.weight", f"{NAME}.bias"]).names()) == 2
    sample.tensors[f"{NAME}.bias"][3] = 0.5  # is no zero, and so stays
    folder = sample.written(tmp_path / "biased")
    assert len(QuantizedFolder(folder, base=[f"{NAME}.weight"]).names()) == 2
    for kind, change in (
        ("packed", {"targets": [f"re:{NAME}"]}),
        ("packed", {"targets": [NAME]}),
        ("nvfp4", (".weight_zero_point", lambda _: 0 * BEYOND[:4])),
        ("fp8 of compressed-tensors", (".weight_zero_point", lambda _: 0 * BEYOND)),
    ):
        sample = changed(sample_of(kind), change)
        assert torch.equal(read(sample.written(tmp_path)), sample.weight)


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_linear_without_a_part_is_refused_or_the_same(kind, tmp_path):
    sample, other = sample_of(kind), "model.layers.1.other"

    def both(table):
        return table | {key.replace(sample.name, other): value for key, value in table.items()}

    whole = {name: tensor.clone() for name, tensor in both(sample.tensors).items()}
    sample.metadata, sample.tensors = both(sample.metadata), whole
    weights = QuantizedFolder(sample.written(tmp_path / "whole"))
    dense = next(one for one in weights.linears if one.startswith(other))
    for key in (key for key in whole if key.startswith(other)):
        sample.tensors = {k: t for k, t in whole.items() if k != key}
        folder = sample.written(tmp_path / key)
        try:
            found = QuantizedFolder(folder).read(dense)
        except SourceError as error:
            assert other in error.message
        else:
            assert torch.equal(found, weights.read(dense)), key


def _damage(data, tensors):
    """Change, drop or rename one stored tensor."""
    name = data.draw(st.sampled_from(sorted(tensors)))
    damage = data.draw(st.sampled_from(["none", "cut", "drop", "cast", "flat", "bytes", "rename"]))
    if damage == "cut" and tensors[name].dim():
        tensors[name] = tensors[name][: data.draw(st.integers(0, len(tensors[name])))]
    elif damage == "drop":
        del tensors[name]
    elif damage == "cast":
        kinds = [torch.int32, torch.uint8, torch.float32, torch.int8, torch.int64, torch.float16]
        dtype = data.draw(st.sampled_from(kinds))
        tensors[name] = tensors[name].contiguous().view(torch.uint8).to(dtype)
    elif damage == "bytes":
        raw = tensors[name].contiguous().clone()
        seed = data.draw(st.integers(0, 2**32))
        noise = torch.randint(0, 256, raw.view(torch.uint8).shape, dtype=torch.uint8,
                              generator=torch.Generator().manual_seed(seed))  # fmt: skip
        tensors[name] = noise.view(raw.dtype)
    elif damage == "flat":
        tensors[name] = tensors[name].flatten()
    elif damage == "rename":
        suffixes = ["", "_scale", ".absmax", "_g_idx"]
        suffixes = [*(f".weight{one}" for one in suffixes), ".SCB", "_blocks"]
        tensors[NAME + data.draw(st.sampled_from(suffixes))] = tensors.pop(name)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_repositories_raise_nothing_but_our_own_errors(data, tmp_path_factory):
    sample = sample_of(data.draw(st.sampled_from(sorted(SAMPLES))))
    config = sample.config or next(iter(sample.files.values()))
    if sample.metadata and data.draw(st.booleans()):
        name, text = sample.metadata.popitem()
        text = json.dumps(damaged(json.loads(text), data))
        named = data.draw(st.sampled_from([name, name, "a", "a.weight", f"{name}.b"]))
        sample.metadata[named] = text[: data.draw(st.sampled_from([10**6, 10**6, 40]))]
    for _ in range(data.draw(st.integers(0, 2))):
        config[data.draw(st.sampled_from(sorted(config)))] = data.draw(st.sampled_from(ODD))
    _damage(data, sample.tensors)
    folder = sample.written(tmp_path_factory.mktemp("damaged"))
    cut = data.draw(st.integers(0, 40))
    if cut == 0:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, 400))])
    try:
        weights = QuantizedFolder(folder)
        for one in weights.names():
            assert tuple(weights.read(one).shape) == tuple(weights.shape(one))
    except QauditError as error:
        assert error.message and error.hint
