"""Routers and other small linears that toolchains leave as they are.

Their weights are few and decide much: which experts read a token, how fast a state decays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

BESIDE_EXPERTS = re.compile(
    # As llm-compressor's examples of Mixtral, Qwen3-MoE and Llama 4 ignore them, and GPTQModel's
    # definitions leave them out; written from memory, not checked against these repositories.
    r"(^|\.)(gate|router|shared_expert_gate)"
    r"(\.(layer|wg|proj|classifier|router_mlp\.\d+|down_proj))?$"
)
ANYWHERE = re.compile(
    # Not converted in the FP8 files of Qwen3-Next and DeepSeek-V3.2; from memory, not checked.
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
