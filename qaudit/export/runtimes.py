"""Exported folders in the programs that load them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from qaudit.checkpoints.configuration import read_configuration
from qaudit.core.keys import nearest
from qaudit.errors import ModelError, UsageError, is_out_of_memory

EXACT, KERNEL = 1e-6, 2e-3
"""Nats per token by which a runtime may differ: with torch's own products, and with its kernels."""


@dataclass(frozen=True)
class Runtime:
    """A program, the packages it needs, and the formats that it loads."""

    name: str
    packages: tuple[str, ...]
    formats: tuple[str, ...]
    load: Callable[[Path, torch.dtype], Any]

    def missing(self, form: str) -> tuple[str, ...]:
        """Return the packages that are not installed."""
        needed = (*self.packages, *_NEEDED.get((self.name, form), ()))
        return tuple(name for name in needed if find_spec(name.replace("-", "_")) is None)

    def described(self, form: str) -> str:
        """Return name and versions."""
        needed = (*self.packages, *_NEEDED.get((self.name, form), ()))
        return ", ".join(f"{name} {_version(name)}" for name in needed)


_NEEDED = {
    ("transformers", "compressed-tensors"): ("compressed-tensors",),
    ("transformers", "bnb"): ("bitsandbytes",),
}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "?"


def _transformers(folder: Path, dtype: torch.dtype) -> Any:
    options: dict[str, Any] = {}
    config = read_configuration(folder).get("quantization_config", {})
    if config.get("quant_method") == "compressed-tensors" and not _is_symmetric(config):
        from transformers import CompressedTensorsConfig

        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    if str(config.get("format", "")).endswith("fp4-pack-quantized"):
        dtype = torch.bfloat16  # to which compressed-tensors decodes 4-bit floats
    disable_progress_bar()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of `dequantize`
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map="cpu", **options
        )
    return model.eval()


def _is_symmetric(config: dict[str, Any]) -> bool:
    return bool(config["config_groups"]["group_0"]["weights"]["symmetric"])


def _gptqmodel(folder: Path, dtype: torch.dtype) -> Any:
    from gptqmodel import BACKEND, GPTQModel

    method = read_configuration(folder)["quantization_config"]["quant_method"]
    backend = BACKEND.GPTQ_TORCH if method == "gptq" else BACKEND.AWQ_TORCH
    # Its plain kernel takes no float32.
    narrow = torch.bfloat16 if dtype == torch.float32 else dtype
    return GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=narrow).model.eval()


RUNTIMES = (
    Runtime(
        "transformers",
        ("transformers",),
        ("compressed-tensors", "bnb"),
        _transformers,
    ),
    Runtime("gptqmodel", ("gptqmodel",), ("gptq", "awq"), _gptqmodel),
)


def runtime_for(form: str, name: str | None) -> Runtime:
    """Return the runtime of a format, or the named one."""
    able = [one for one in RUNTIMES if form in one.formats]
    if name is None:
        return able[0]
    for one in able:
        if one.name == name:
            return one
    raise UsageError(
        f"`{name}` is no runtime here that loads `{form}`",
        hint=nearest(name, [one.name for one in able]),
    )


def tolerance(folder: Path) -> float:
    """Return by how many nats per token a runtime may differ.

    transformers computes with the weights of symmetric compressed-tensors files; it rounds those
    with zero points to the type of their scales, and 4-bit floats to bfloat16.
    """
    config = read_configuration(folder)["quantization_config"]
    plain = config.get("quant_method") == "compressed-tensors" and _is_symmetric(config)
    return EXACT if plain and "fp4" not in config["format"] else KERNEL


def loaded(runtime: Runtime, folder: Path, dtype: torch.dtype) -> Any:
    """Load a folder in a runtime; refuse what it cannot load."""
    try:
        return runtime.load(folder, dtype)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:160]
        raise ModelError(
            f"`{runtime.name}` does not load `{folder}`: {reason}",
            hint="compare its version with the one in the folder's README.md",
        ) from error
