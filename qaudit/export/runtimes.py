"""Exported folders in the programs that load them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from qaudit.checkpoints.configuration import read_configuration
from qaudit.errors import ModelError, UsageError, is_out_of_memory
from qaudit.export import llamacpp
from qaudit.formats.gguf import FILE as GGUF
from qaudit.formats.registry import formats
from qaudit.model.config import class_of, read_config
from qaudit.model.skeleton import forget_lengths
from qaudit.support.keys import nearest
from qaudit.types import Tolerances


@dataclass(frozen=True)
class Loaded:
    """A folder in its runtime: what it predicts behind every token of a window but the last."""

    vocabulary: int
    logits: Callable[[Tensor], Tensor]  # (B, T) -> (B, T - 1, V)
    losses: Callable[[Tensor], Tensor] | None = None  # (B, T - 1), of a runtime without logits


@dataclass(frozen=True)
class Program:
    """A program and the packages it needs; a format says which programs load it."""

    name: str
    packages: tuple[str, ...]
    load: Callable[[Path, torch.dtype], Loaded]
    rounds_activations: bool = False

    def missing(self, form: str) -> tuple[str, ...]:
        return tuple(
            name for name in self._needed(form) if find_spec(name.replace("-", "_")) is None
        )

    def described(self, form: str) -> str:
        return ", ".join(f"{name} {_version(name)}" for name in self._needed(form))

    def _needed(self, form: str) -> tuple[str, ...]:
        return (*self.packages, *formats()[form].loaded_by[self.name])

    def tolerances(
        self, allowed: Tolerances, folder: Path, dtype: str, *, has_experts: bool
    ) -> tuple[float, float]:
        """Return by how much loss and KL divergence may differ in this runtime's arithmetic.

        `dtype` is that of the audit.
        """
        if self.rounds_activations:
            return allowed.activations, allowed.activations
        if dtype == "float32" and (has_experts or _is_narrow(self, folder)):
            return allowed.narrow, allowed.narrow
        if is_plain(self, folder):
            return allowed.plain, allowed.plain
        return allowed.loss, allowed.kl


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "?"


def _transformers(folder: Path, dtype: torch.dtype) -> Loaded:
    options: dict[str, Any] = {}
    config = read_configuration(folder).get("quantization_config", {})
    if config.get("quant_method") == "compressed-tensors" and not _is_symmetric(config):
        from transformers import CompressedTensorsConfig

        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    if str(config.get("format", "")).endswith("fp4-pack-quantized"):
        dtype = torch.bfloat16  # to which compressed-tensors decodes 4-bit floats
    disable_progress_bar()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of `dequantize`
        if config.get("quant_method") == "bitsandbytes":
            options["device_map"] = "cpu"  # else it looks for a GPU; this needs accelerate
        model = class_of(read_config(folder)).from_pretrained(folder, dtype=dtype, **options)
    return _of_library(model.eval())


def _of_library(model: Any) -> Loaded:
    forget_lengths(model)

    def logits(tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
        return logits_BTV[:, :-1]

    return Loaded(int(model.config.get_text_config().vocab_size), logits)


def _is_symmetric(config: dict[str, Any]) -> bool:
    return bool(config["config_groups"]["group_0"]["weights"]["symmetric"])


def _gptqmodel(folder: Path, dtype: torch.dtype) -> Loaded:
    from gptqmodel import BACKEND, GPTQModel

    method = read_configuration(folder)["quantization_config"]["quant_method"]
    backend = BACKEND.GPTQ_TORCH if method == "gptq" else BACKEND.AWQ_TORCH
    # Its plain kernel takes no float32.
    narrow = torch.bfloat16 if dtype == torch.float32 else dtype
    model = GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=narrow).model
    return _of_library(model.eval())


def _vllm(folder: Path, dtype: torch.dtype) -> Loaded:
    """Load a folder in vLLM, which tells the log-probability of each token of a prompt."""
    from vllm import LLM, SamplingParams

    narrow = torch.bfloat16 if dtype == torch.float32 else dtype  # its kernels take no float32
    engine = LLM(
        model=str(folder),
        dtype=str(narrow).removeprefix("torch."),
        enforce_eager=True,
        enable_prefix_caching=False,  # cached tokens have no log-probabilities
    )
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def losses(tokens_BT: Tensor) -> Tensor:
        prompts = [{"prompt_token_ids": row} for row in tokens_BT.tolist()]
        answers = engine.generate(prompts, asked, use_tqdm=False)
        told_BT = [one.prompt_logprobs[1:] for one in answers]
        rows = zip(told_BT, tokens_BT[:, 1:].tolist(), strict=True)
        return torch.tensor(
            [[-t[token].logprob for t, token in zip(*row, strict=True)] for row in rows]
        )

    def logits(tokens_BT: Tensor) -> Tensor:
        raise NotImplementedError("vLLM tells no logits of a prompt")

    return Loaded(1, logits, losses)


def _llama_cpp(folder: Path, dtype: torch.dtype) -> Loaded:
    """Load a folder in llama.cpp, which chooses how it computes."""
    model = llamacpp.LlamaCpp(folder / GGUF)
    return Loaded(model.vocabulary, lambda tokens_BT: model(tokens_BT)[:, :-1])


RUNTIMES = (
    Program("transformers", ("transformers",), _transformers),
    Program("gptqmodel", ("gptqmodel",), _gptqmodel),
    Program("vllm", ("vllm",), _vllm),
    Program("llama.cpp", ("xllamacpp",), _llama_cpp, rounds_activations=True),
)


def runtime_for(form: str, name: str | None) -> Program:
    able = [program for program in RUNTIMES if program.name in formats()[form].loaded_by]
    for program in able:
        if name in (None, program.name):
            return program
    raise UsageError(
        f"`{name}` is no runtime here that loads `{form}`",
        hint=nearest(str(name), [program.name for program in able]),
    )


def _is_narrow(runtime: Program, folder: Path) -> bool:
    """Return whether a runtime computes in bfloat16 whatever it is asked for.

    bitsandbytes does in 4 bits where a processor has AVX512-BF16: its kernel rounds weights and
    inputs, and a product is off by 3.2e-3 of itself under `bnb_4bit_compute_dtype: float32` too. Of
    experts transformers decodes compressed-tensors files to bfloat16, and 4-bit floats everywhere.
    """
    config = read_configuration(folder)["quantization_config"]
    four_bits = config.get("load_in_4bit") or "fp4" in str(config.get("format", ""))
    return runtime.name != "transformers" or bool(four_bits)


def is_plain(runtime: Program, folder: Path) -> bool:
    """Return whether a runtime multiplies with the weights of a folder by torch's own products.

    transformers does with symmetric compressed-tensors files; it rounds weights with zero points to
    the type of their scales, and 4-bit floats to bfloat16.
    """
    config = read_configuration(folder)["quantization_config"]
    plain = config.get("quant_method") == "compressed-tensors" and _is_symmetric(config)
    return runtime.name == "transformers" and plain and "fp4" not in config["format"]


@contextmanager
def without_bars() -> Iterator[None]:
    """Let libraries draw no progress bars: ours says where a verification is."""
    original = tqdm.__init__

    def silent(bar: Any, *arguments: Any, **options: Any) -> None:
        original(bar, *arguments, **{**options, "disable": True})

    tqdm.__init__ = silent
    try:
        yield
    finally:
        tqdm.__init__ = original


def loaded(runtime: Program, folder: Path, dtype: torch.dtype) -> Loaded:
    try:
        with redirect_stdout(sys.stderr):  # where runtimes log; results are on stdout
            return runtime.load(folder, dtype)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:160]
        raise ModelError(
            f"`{runtime.name}` does not load `{folder}`: {reason}",
            hint="compare its version with the one in the folder's README.md",
        ) from error
