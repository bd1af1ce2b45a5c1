"""Mixtures of experts: cost against llm-compressor, and few calibration tokens of each expert.

    python -m benchmarks.experts cost [--repeats 1] [--dtype float32]
    python -m benchmarks.experts tokens [--seeds 3]

`cost` quantizes a random Qwen3-MoE with 15M active parameters, embeddings included, with
`gptq-4bit`, once calibrated on the tokens routed to each expert and once on all tokens: CPU
seconds of llm-compressor's `oneshot`, without loading the model, over ours, reading it included.
Routers and the head are left as they are on both sides.

`tokens` gives each expert of a random Mixtral the first N of its calibration tokens, all other
linears all of them, and prints the KL divergence of `gptq-4bit` over that of `rtn-4bit`: as it
is, and with `all_tokens=true`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.clock import PEER_PYTHON, print_machine, run_apart
from benchmarks.models import CONTEXT

GROUP = 32
WINDOWS = 32
TOKENS = (0, 1, 3, 12, 48, 192)


def make_moe(folder: Path, dtype: str) -> None:
    """Write a random Qwen3-MoE of which a token uses 15M parameters, and tokens beside it."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=288,
        intermediate_size=768,
        moe_intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=48,
        num_experts=16,
        num_experts_per_tok=2,
        vocab_size=32000,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen3MoeForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    draw = np.random.default_rng(1)
    tokens = draw.integers(3, 32000, (2 * WINDOWS, CONTEXT), dtype=np.int32)
    np.save(folder / "tokens.npy", tokens)


def cost(repeats: int, dtype: str) -> None:
    """Print the ratio of CPU seconds with routed tokens and with all tokens."""
    if not PEER_PYTHON.exists():
        sys.exit("llm-compressor is not there: run `make bench`, which installs it")
    print_machine()
    best: dict[str, float] = {}

    def keep(name: str, seconds: float) -> None:
        best[name] = min(seconds, best.get(name, float("inf")))

    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_moe(folder, dtype)
        for _ in range(repeats):
            for way in ("routed", "all"):
                scheme = f"gptq-4bit:group={GROUP}:all_tokens={str(way == 'all').lower()}"
                ours = run_apart(sys.executable, "run_qaudit", folder, "quantize-only", scheme)
                keep(f"ours {way}", ours["seconds"])
                peer = run_apart(
                    PEER_PYTHON, "run_llmcompressor", folder, f"gptq-4bit-{way}", GROUP, 4
                )
                keep(f"peer {way}", peer["quantize"])
    print(f"\n15M active, {dtype}, {WINDOWS} windows of {CONTEXT}, groups of {GROUP}; goal >= 2")
    for way in ("routed", "all"):
        ours_seconds, peer_seconds = best[f"ours {way}"], best[f"peer {way}"]
        print(f"    {way:<8}{peer_seconds / ours_seconds:6.2f}   ", end="")
        print(f"CPU seconds: llm-compressor {peer_seconds:.1f}, qaudit {ours_seconds:.1f}")


def few_tokens(seeds: int) -> None:
    """Print KL of gptq over rtn by the tokens of each expert."""
    import torch

    torch.set_num_threads(1)
    ways = {"as it is": "gptq-4bit:group=32", "all tokens": "gptq-4bit:group=32:all_tokens=true"}
    ratios = {way: np.zeros((seeds, len(TOKENS))) for way in ways}
    for seed in range(seeds):
        with TemporaryDirectory() as temporary:
            folder = _mixtral(Path(temporary) / "model", seed)
            rtn = _divergence(folder, "rtn-4bit:group=32", None)
            for way, scheme in ways.items():
                for k, tokens in enumerate(TOKENS):
                    ratios[way][seed, k] = _divergence(folder, scheme, tokens) / rtn
    print(f"KL of gptq-4bit over that of rtn-4bit, the mean of {seeds} random Mixtrals")
    print(f"{'tokens of each expert':<24}" + "".join(f"{tokens:>7}" for tokens in TOKENS))
    for way, of_seeds in ratios.items():
        print(f"{way:<24}" + "".join(f"{mean:>7.2f}" for mean in of_seeds.mean(0)))


def _mixtral(folder: Path, seed: int) -> Path:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=2048,
        max_position_embeddings=256,
    )
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.06)
    model.save_pretrained(folder)
    return folder


def _divergence(folder: Path, name: str, most: int | None) -> float:
    """Return the KL divergence per token, where each expert sees its first `most` tokens."""
    import torch

    from qaudit.checkpoints.safetensors import WeightFolder
    from qaudit.core.registry import parse_scheme
    from qaudit.engine.batches import make_batches
    from qaudit.engine.block_pass import run_blocks
    from qaudit.engine.hidden_states import HiddenStates
    from qaudit.engine.tokens import Feed
    from qaudit.model.blocks import BlockModel
    from qaudit.model.experts import Experts
    from qaudit.types import Window

    draw = np.random.default_rng(2)
    calibration, evaluation = (
        [Window(k, row) for k, row in enumerate(draw.integers(3, 2048, (n, 128), dtype=np.int32))]
        for n in (32, 16)
    )
    device, plain = torch.device("cpu"), Experts.routed

    def cut(self: Experts, *given: Any) -> Any:
        routed = plain(self, *given)
        rows = tuple(rows_T[:most] for rows_T in routed.rows)
        return replace(routed, rows=rows, tokens=rows)

    model = BlockModel(folder, WeightFolder(folder), dtype=torch.float32, device=device)
    # All calibration tokens are in one batch, so that its first rows are the first of all.
    feed = Feed(make_batches(calibration, 128, 2**20), make_batches(evaluation, 128))
    if most is not None:
        Experts.routed = cut  # type: ignore[method-assign]
    try:
        with TemporaryDirectory() as spill, HiddenStates(Path(spill), 2**34, device) as states:
            tallies = run_blocks(model, feed, (parse_scheme(name),), states)
    finally:
        Experts.routed = plain  # type: ignore[method-assign]
    *_, tally = tallies.values()
    return float(torch.cat([kl[:, 1:].flatten() for kl in tally.kl]).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("cost", "tokens"))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.what == "cost":
        cost(options.repeats, options.dtype)
    else:
        few_tokens(options.seeds)


if __name__ == "__main__":
    main()
