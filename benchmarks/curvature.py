"""Peak memory and time of one Hessian-vector product, set against one training step.

    python -m benchmarks.curvature [--layers 12] [--context 512] [--windows 2] [--vocabulary 8192]

A random Llama shape in fp32, one thread. Each figure is of a process of its own: the peak of
its resident memory above what the imports take, and the CPU seconds of the second of two runs.
The step is AdamW's, without checkpointing and with torch's. Products are by two backward passes
that keep everything, with `torch.utils.checkpoint` around each block, and ours; the slowest and
the largest of them all give the same numbers, which is checked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

_HEAD = """
import json, resource, sys, time
from functools import partial
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig
from qaudit.core.spectrum import signs
from qaudit.host import return_large_blocks, share_one_arena
from qaudit.diagnostics.curvature_measure import LossHessian
from qaudit.diagnostics.curvature_measure import product_nbytes
torch.set_num_threads(1)
share_one_arena()
return_large_blocks()
layers, context, windows, vocabulary = map(int, sys.argv[1:])
def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
before = resident()
config = LlamaConfig(hidden_size=512, intermediate_size=1408, num_hidden_layers=layers,
    num_attention_heads=8, num_key_value_heads=8, vocab_size=vocabulary, tie_word_embeddings=False,
    max_position_embeddings=context)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config).eval()
tokens_BT = torch.randint(0, vocabulary, (windows, context))
parameters = list(model.parameters())
def nll():
    logits = model(input_ids=tokens_BT, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())
def checkpointed():
    for block in model.model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
def run(step):
    value = step()
    began = time.process_time()
    step()
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    estimate = product_nbytes(config, sum(p.numel() for p in parameters), windows, context)
    return {"nbytes": peak - before, "seconds": seconds, "value": value, "estimate": estimate}
"""
_STEP = """
optimizer = torch.optim.AdamW(parameters, foreach=False)
def step():
    optimizer.zero_grad()
    nll().backward()
    optimizer.step()
    return 0.0
"""
_PRODUCT = """
sizes = [p.numel() for p in parameters]
along = [v.view_as(p) for v, p in zip(signs(sum(sizes), 0, parameters[0].detach()).split(sizes),
                                      parameters)]
def step():
    with sdpa_kernel(SDPBackend.MATH):
        first = torch.autograd.grad(nll(), parameters, create_graph=True)
        slope = sum((g * v).sum() for g, v in zip(first, along))
        del first
        second = torch.autograd.grad(slope, parameters)
    return float(sum((h * v).sum() for h, v in zip(second, along)))
"""
_OURS = """
scored_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
scored_BT[:, 0] = False
hessian = LossHessian(model, list(model.model.layers), [(0, tokens_BT, scored_BT)])
vector_P = signs(sum(hessian.sizes), 0, hessian.like)
def step():
    return float(hessian(vector_P).forms_K[0]) / int(hessian.tokens_D.sum())
"""
_SAY = "print(json.dumps(run(step)))"

CASES = {
    "training step": _STEP,
    "training step, checkpointed": "checkpointed()\n" + _STEP,
    "product, everything kept": _PRODUCT,
    "product, torch.utils.checkpoint": "checkpointed()\n" + _PRODUCT,
    "product, ours": _OURS,
}


def measure(case: str, shape: tuple[int, ...]) -> dict[str, float]:
    """Run one case in a process of its own."""
    script = _HEAD + CASES[case] + _SAY
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, shape)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 12), ("context", 512), ("windows", 2), ("vocabulary", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    shape = tuple(vars(parser.parse_args()).values())
    found = {case: measure(case, shape) for case in CASES}
    step = found["training step"]
    print("memory and time of a training step = 1; MiB above the imports")
    for case, one in found.items():
        print(
            f"{case:32} memory {one['nbytes'] / step['nbytes']:5.2f} "
            f"({one['nbytes'] / 2**20:6.0f} MiB)  time {one['seconds'] / step['seconds']:5.2f}"
        )
    print(f"estimated for a product of ours: {found['product, ours']['estimate'] / 2**20:.0f} MiB")
    values = [one["value"] for case, one in found.items() if case.startswith("product")]
    print(f"v.Hv by the three: {', '.join(f'{value:.6g}' for value in values)}")


if __name__ == "__main__":
    main()
