"""Repositories that are quantized already, written bit by bit and without any packer of ours."""

import json

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from tests.support import torchao

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the half-byte of each of eight neighbours


def write(folder, tensors, own, metadata=None, **more):
    """Write a folder with one file of weights and its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(stored, folder / "model.safetensors", dict(metadata or {}))
    config = {**more, **({"quantization_config": own} if own else {})}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def words(codes_RN, bits):
    """Pack each row by the definition: one long number, code i at bit i * bits."""
    rows = []
    for row in codes_RN.tolist():
        number = sum(code << (i * bits) for i, code in enumerate(row))
        nbytes = -(-len(row) * bits // 32) * 4
        rows.append(np.frombuffer(number.to_bytes(nbytes, "little"), dtype="<i4").copy())
    return torch.from_numpy(np.stack(rows))


def padded_words(codes_RN, bits):
    """Pack each row as many whole codes to a word as fit."""
    per_word = 32 // bits
    parts = [words(codes_RN[:, i : i + per_word], bits)[:, :1]
             for i in range(0, codes_RN.shape[1], per_word)]  # fmt: skip
    return torch.cat(parts, dim=1)


def awq_words(codes_NR):
    """Pack each eight neighbours in AutoAWQ's order."""
    order = [AWQ_PLACES.index(place) for place in range(8)]
    shuffled = codes_NR.reshape(len(codes_NR), -1, 8)[..., order].reshape(codes_NR.shape)
    return words(shuffled, 4)


class Affine:
    """Random codes, scales and zero points of one linear, and the weight that they mean."""

    def __init__(self, seed, rows, columns, bits, size):
        generator = torch.Generator().manual_seed(seed)
        self.bits, self.size, groups = bits, size, -(-columns // size)
        top = 2**bits

        def whole(*shape):
            return torch.randint(0, top, shape, generator=generator, dtype=torch.int32)

        self.codes_RC, self.zeros_RG = whole(rows, columns), whole(rows, groups)
        scales_RG = torch.rand(rows, groups, generator=generator) * 0.01 + 0.001
        self.scales_RG = scales_RG.to(torch.bfloat16).float()  # exact in fp16 too at this size
        self.group_of_C = torch.arange(columns) // size

    def weight(self, zeros_RG=None):
        """Return the dense weight, element by element."""
        zeros_RG = self.zeros_RG if zeros_RG is None else zeros_RG
        rows, columns = self.codes_RC.shape
        dense = np.empty((rows, columns), np.float32)
        codes, zeros, scales = self.codes_RC.numpy(), zeros_RG.numpy(), self.scales_RG.numpy()
        for c in range(columns):
            g = int(self.group_of_C[c])
            dense[:, c] = (codes[:, c] - zeros[:, g]).astype(np.float32) * scales[:, g]
        return torch.from_numpy(dense)


def gptq_tensors(one, name, *, first, index=True):
    stored = (one.zeros_RG - 1) % 2**one.bits if first else one.zeros_RG
    tensors = {
        f"{name}.qweight": words(one.codes_RC, one.bits).T,
        f"{name}.qzeros": words(stored.T, one.bits),
        f"{name}.scales": one.scales_RG.T.half(),
    }
    return {**tensors, **({f"{name}.g_idx": one.group_of_C.int()} if index else {})}


def awq_tensors(one, name):
    return {
        f"{name}.qweight": awq_words(one.codes_RC.T),
        f"{name}.qzeros": awq_words(one.zeros_RG.T),
        f"{name}.scales": one.scales_RG.T.half(),
    }


def ct_tensors(one, name, *, symmetric, pack=words):
    tensors = {
        f"{name}.weight_packed": pack(one.codes_RC, one.bits),
        f"{name}.weight_scale": one.scales_RG.bfloat16(),
        f"{name}.weight_shape": torch.tensor(one.codes_RC.shape),
    }
    if not symmetric:
        tensors[f"{name}.weight_zero_point"] = pack(one.zeros_RG.T, one.bits).T
    return tensors


def ct_config(arguments, kind="pack-quantized"):
    group = {"targets": ["Linear"], "weights": dict(arguments)}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def mlx_tensors(one, name):
    return {
        f"{name}.weight": words(one.codes_RC, one.bits).view(torch.uint32),
        f"{name}.scales": one.scales_RG.bfloat16(),
        f"{name}.biases": (-one.zeros_RG * one.scales_RG).float(),
    }


class Rounded(Affine):
    """A weight rounded to a grid for each group, the way of no tool in particular."""

    def __init__(self, weight_RC, bits, size):
        rows, columns = weight_RC.shape
        grouped_RGK = weight_RC.float().reshape(rows, -1, size)
        low_RG, high_RG = grouped_RGK.amin(-1).clamp(max=0), grouped_RGK.amax(-1).clamp(min=0)
        scales_RG = ((high_RG - low_RG) / (2**bits - 1)).clamp(min=2.0**-14)
        self.bits, self.size = bits, size
        self.scales_RG = scales_RG.to(torch.bfloat16).float()
        zeros_RG = (-low_RG / self.scales_RG).round().clamp(0, 2**bits - 1)
        self.zeros_RG = zeros_RG.int()
        self.group_of_C = torch.arange(columns) // size
        codes_RGK = (grouped_RGK / self.scales_RG[..., None]).round() + zeros_RG[..., None]
        self.codes_RC = codes_RGK.clamp(0, 2**bits - 1).reshape(rows, columns).int()


def is_linear(name):
    return "_proj." in name and name.endswith(".weight")


def quantized_copy(base, folder, kind, *, bits=4, size=32, scale=1.0):
    """Write a quantized copy of a model beside its settings; return the weights that it means.

    `scale` changes the final norm, which a reader has to take from this file.
    """
    folder.mkdir(parents=True)
    for path in base.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    tensors, dense = dict[str, Tensor](), dict[str, Tensor]()
    metadata = dict[str, str]()
    for name, tensor in safetensors.torch.load_file(base / "model.safetensors").items():
        if not is_linear(name):
            tensors[name] = dense[name] = tensor * (scale if name == "model.norm.weight" else 1)
            continue
        one, stem = Rounded(tensor, bits, size), name.removesuffix(".weight")
        dense[name] = one.weight()
        tensors |= _WRITERS[kind](one, stem)
        if kind == "torchao":
            metadata[name] = torchao.described("intx", one)
    own = {
        "gptq": {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": False},
        "awq": {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"},
        "compressed-tensors": ct_config(
            {"num_bits": bits, "symmetric": False, "strategy": "group", "group_size": size}
        ),
        "torchao": torchao.config("intx", bits),
    }[kind]
    write(folder, tensors, own, metadata, **json.loads((base / "config.json").read_text()))
    return dense


_WRITERS = {
    "gptq": lambda one, name: gptq_tensors(one, name, first=True),
    "awq": awq_tensors,
    "compressed-tensors": lambda one, name: ct_tensors(one, name, symmetric=False),
    "torchao": lambda one, name: torchao.tensors("intx", one, name),
}
