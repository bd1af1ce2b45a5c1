"""Routers and other small linears that toolchains leave as they are.

Their weights are few and decide much: which experts read a token, how fast a state decays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

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
    owners = tuple(name.rpartition(".")[0] for name in experts)
    for name in linears:
        match = BESIDE_EXPERTS.search(name)
        around = name[: match.start()] if match else ""
        if ANYWHERE.search(name) or (match and any(_near(around, owner) for owner in owners)):
            yield name


def _near(around: str, owner: str) -> bool:
    """Return whether a module is the one that holds the experts, or inside it."""
    return around == owner or around.startswith(f"{owner}.")
