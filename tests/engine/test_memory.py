"""What the one pass holds, measured in processes of its own and set against plain transformers.

Peak resident memory above what the imports take. The shape is that of a 135M model in fp32 at
context 512; full precision and eight schemes, 16k calibration and 16k evaluation tokens, with
streams spilled past 64 MiB.
"""

import json
import subprocess
import sys
import textwrap

import pytest

MODEL = """
import json, resource, sys, tempfile
from pathlib import Path
import numpy as np, torch
torch.set_num_threads(2)
from transformers import AutoModelForCausalLM, LlamaConfig
import bitsandbytes
folder = Path(sys.argv[1])
def rss():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("VmRSS",)):
            return int(line.split()[1]) * 1024
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
"""
MAKE = """
config = LlamaConfig(hidden_size=576, intermediate_size=1536, num_hidden_layers=int(sys.argv[2]),
    num_attention_heads=9, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
    max_position_embeddings=512)
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config).save_pretrained(folder)
"""
PLAIN = """
baseline = rss()
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
with torch.no_grad():
    model(input_ids=torch.randint(3, 40000, (1, 512)), use_cache=False)
print(json.dumps({"above": peak() - baseline}))
"""
AUDIT = """
from qaudit.core.registry import DEFAULT_SCHEMES, parse_schemes
from qaudit.engine.batches import make_batches
from qaudit.engine.blocks import BlockModel
from qaudit.engine.one_pass import Feed, run_blocks
from qaudit.engine.price import Load, Sizes, memory_nbytes
from qaudit.engine.streams import Streams
from qaudit.sources.safetensors import WeightFolder
from qaudit.types import Protocol, Window
tokens = int(sys.argv[2])
def windows(seed):
    random = np.random.default_rng(seed)
    return [Window(i, random.integers(3, 40000, 512).astype(np.int32)) for i in range(tokens // 512)]
limit = 64 * 2**20
schemes = parse_schemes(DEFAULT_SCHEMES)
baseline = rss()
model = BlockModel(folder, WeightFolder(folder), dtype=torch.float32, device=torch.device("cpu"))
feed = Feed(make_batches(windows(1), 512), make_batches(windows(2), 512))
with tempfile.TemporaryDirectory() as spill, Streams(Path(spill), limit, model.device) as streams:
    run_blocks(model, feed, schemes, streams)
protocol = Protocol(512, 512, evaluation_documents=tokens // 512, calibration_documents=tokens // 512)
estimate = memory_nbytes(Sizes.read(folder), Load.of(protocol, schemes), 4, limit)
print(json.dumps({"above": peak() - baseline, "estimate": estimate}))
"""


def process(script, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", MODEL + textwrap.dedent(script), *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout) if done.stdout.strip() else {}


@pytest.mark.slow
def test_an_audit_needs_no_more_than_loading_the_model_and_does_not_grow_with_depth(tmp_path):
    found = {}
    for layers in (12, 24, 30):
        folder = tmp_path / str(layers)
        process(MAKE, folder, layers)
        tokens = 16384 if layers == 30 else 8192
        found[layers] = process(AUDIT, folder, tokens)
    plain = process(PLAIN, tmp_path / "30")
    report = {k: {n: round(v / 2**20) for n, v in row.items()} for k, row in found.items()}
    print("MiB above the imports:", report, "plain:", round(plain["above"] / 2**20))
    assert found[30]["above"] <= plain["above"]
    assert found[24]["above"] <= 1.1 * found[12]["above"]
    assert found[30]["above"] <= found[30]["estimate"] <= 3 * found[30]["above"]
