"""The model types that tests hold equal to `transformers`. No torch.

Routers and other small linears that toolchains leave as they are.

Their weights are few and decide much: which experts read a token, how fast a state decays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qaudit.checkpoints.configuration import is_own_code, read_configuration, tables_of

STREAMABLE = frozenset({
    "apertus", "bloom", "cohere", "cohere2", "deepseek_v4", "exaone4", "falcon", "falcon_h1",
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm_moe_dsa", "gpt2", "gpt_neo", "gpt_neox", "gpt_oss",
    "gptj", "granite", "hy_v4", "idefics3", "llama", "mistral", "mistral_large4", "mixtral",
    "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "rwkv", "seed_oss", "smollm3", "stablelm", "starcoder2",
    "zaya",
})  # fmt: skip
"""Model types whose streamed logits are held bit-identical to `transformers` by a test."""

BRANCHING = frozenset({
    "apertus", "cohere", "glm", "glm4", "gpt2", "gpt_neox", "gptj", "granite", "llama",
    "mistral", "nemotron", "olmo", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip
"""Model types that read trees as they read each of their sequences alone, which a test holds."""


NO_LIMIT = 1 << 40
"""More tokens than any window has."""


def reads_trees(config: Mapping[str, Any]) -> bool:
    """Return whether a plan may expect trees; `BlockModel.takes_branches` asks the model."""
    model_type = str(config.get("model_type"))
    if model_type not in BRANCHING:
        return False
    kinds = config.get("layer_types")
    if isinstance(kinds, Sequence) and kinds:
        return all(kind == "full_attention" for kind in kinds)
    # The one family here that slides where `config.json` names no window.
    window = config.get("sliding_window", 4096 if model_type == "mistral" else None)
    return window is None or config.get("use_sliding_window", True) is False


def pad_until(folders: Iterable[Path]) -> int:
    """Return up to how many tokens the models in folders read a padded window as it is alone."""
    configs = [read_configuration(f) for f in folders if (f / "config.json").is_file()]
    return min(map(fixed_until, configs), default=NO_LIMIT)


def fixed_until(config: Mapping[str, Any]) -> int:
    """Return how many tokens a window may have whose positions do not depend on its length.

    Beyond that, `dynamic` and `longrope` rotate all tokens by how many there are. Code of a
    repository may do so from the first token on.
    """
    if is_own_code(config):
        return 0
    tables = list(tables_of(config))
    ropes = [
        rope for table in tables for key in _ROTATIONS for rope in tables_of(table.get(key) or ())
    ]
    if all(r.get("rope_type", r.get("type")) in _FIXED and "long_factor" not in r for r in ropes):
        return NO_LIMIT
    trained = ("original_max_position_embeddings", "max_position_embeddings")
    lengths = [t.get(key) for t in tables for key in trained]
    return min((n for n in lengths if isinstance(n, int)), default=0)


_ROTATIONS = ("rope_parameters", "rope_scaling")
_FIXED = (None, "default", "linear", "llama3", "mrope", "proportional", "yarn")
"""Kinds of rotation that do not depend on how many tokens there are."""


BESIDE_EXPERTS = re.compile(
    # llm-compressor ignores them in examples/quantizing_moe_fp8 (`block_sparse_moe.gate`),
    # examples/awq/qwen3_next_example.py (`mlp.gate`, `mlp.shared_expert_gate`) and for Llama 4
    # (`router`); GPTQModel marks `gate:!` and `shared_expert_gate:!` in its definitions of
    # deepseek_v32, afmoe and qwen3_next. Looked up in copies of 2025 and 2026; the names behind
    # the dot are those of transformers' routers, for which neither has an example.
    r"(^|\.)(gate|router|shared_expert_gate)"
    r"(\.(layer|wg|proj|classifier|router_mlp\.\d+|down_proj))?$"
)
ANYWHERE = re.compile(
    # GPTQModel's definitions mark `in_proj_b:!`, `in_proj_a:!` (Qwen3.5), `in_proj_ba:!`
    # (qwen3_next; earlier copies quantized it) and `indexer.weights_proj:0:!` (deepseek_v32, for
    # its scores are summed in float32). llm-compressor's example of Qwen3-Next quantizes
    # `in_proj_ba`, and those of Qwen3.5 leave all of `linear_attn`. The FP8 files of these
    # releases themselves were not seen.
    r"(^|\.)(in_proj_(a|b|ba)|indexer\.weights_proj)$"
)


def left_as_gates(linears: Iterable[str], experts: Iterable[str]) -> Iterator[str]:
    """Yield which linears of a block are routers or gates; `gate` alone means little elsewhere."""
    owners = tuple(f"{name.rpartition('.')[0]}." for name in experts)
    for name in linears:
        match = BESIDE_EXPERTS.search(name)
        # In the module that holds the experts, or inside it.
        is_beside = match is not None and f"{name[: match.start()]}.".startswith(owners)
        if is_beside or ANYWHERE.search(name):
            yield name
