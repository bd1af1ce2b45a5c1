"""Peak memory of the one pass, set against loading the model with transformers.

    python -m benchmarks.memory

The shape of a 135M model in fp32 at context 512, random weights; full precision and the eight
default schemes; streams spilled past 64 MiB. Each figure is the peak resident memory of a
process of its own, above what the imports take.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_NBYTES = 64 * 2**20

_HEAD = """
import json, sys, tempfile
from pathlib import Path
import numpy as np, torch
torch.set_num_threads(2)
from transformers import AutoModelForCausalLM, LlamaConfig
import bitsandbytes
folder = Path(sys.argv[1])
def held(kind):  # not `getrusage`, which starts from the peak of the process that started this one
    return int(Path("/proc/self/status").read_text().partition(kind)[2].split()[0]) * 1024
"""
_MAKE = """
config = LlamaConfig(hidden_size=576, intermediate_size=1536, num_hidden_layers=int(sys.argv[2]),
    num_attention_heads=9, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
    max_position_embeddings=512)
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config).save_pretrained(folder)
"""
_PLAIN = """
before = held("VmRSS:")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
with torch.no_grad():
    model(input_ids=torch.randint(3, 40000, (1, 512)), use_cache=False)
print(json.dumps({"nbytes": held("VmHWM:") - before}))
"""
_AUDIT = """
from qaudit.core.registry import parse_schemes
from qaudit.settings import DEFAULT_SCHEMES
from qaudit.engine.batches import make_batches
from qaudit.model.blocks import BlockModel
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.tokens import Feed
from qaudit.planning.sizes import Load, TextSize
from qaudit.planning.machine import Footprint
from qaudit.engine.hidden_states import HiddenStates
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.types import Protocol, Window
from tests.support.tiny import header_sizes
documents, limit = int(sys.argv[2]) // 512, int(sys.argv[3])
def windows(seed):
    random = np.random.default_rng(seed)
    drawn = random.integers(3, 40000, (documents, 512)).astype(np.int32)
    return [Window(i, tokens) for i, tokens in enumerate(drawn)]
schemes = parse_schemes(DEFAULT_SCHEMES)
before = held("VmRSS:")
model = BlockModel(folder, WeightFolder(folder), dtype=torch.float32, device=torch.device("cpu"))
feed = Feed(make_batches(windows(1), 512), make_batches(windows(2), 512))
with tempfile.TemporaryDirectory() as spill:
    with HiddenStates(Path(spill), limit, model.device) as streams:
        run_blocks(model, feed, schemes, streams)
protocol = Protocol(512, evaluation_documents=documents, calibration_documents=documents)
load = Load.of(schemes, TextSize.bound(protocol))
estimate = Footprint(header_sizes(folder), load, 4, limit).memory_nbytes
print(json.dumps({"nbytes": held("VmHWM:") - before, "estimate": estimate}))
"""


def make_model(folder: Path, layers: int) -> None:
    """Write a random model."""
    _run(_MAKE, folder, layers)


def plain(folder: Path) -> int:
    """Return what loading a model and one forward pass take."""
    return int(_run(_PLAIN, folder)["nbytes"])


def audit(folder: Path, tokens: int) -> dict[str, int]:
    """Return what an audit takes, and what was estimated, in bytes."""
    return _run(_AUDIT, folder, tokens, LIMIT_NBYTES)


def _run(script: str, *arguments: object) -> dict[str, int]:
    command = [sys.executable, "-c", _HEAD + script, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, int] = json.loads(done.stdout) if done.stdout.strip() else {}
    return found


def main() -> None:
    """Print the table."""
    print("MiB above the imports; layers, calibration and evaluation tokens each")
    with tempfile.TemporaryDirectory() as place:
        for layers, tokens in ((12, 4096), (24, 4096), (30, 4096)):
            folder = Path(place) / str(layers)
            make_model(folder, layers)
            found = {name: round(n / 2**20) for name, n in audit(folder, tokens).items()}
            whole = round(plain(folder) / 2**20)
            print(f"{layers:3} {tokens:6}  audit {found}  from_pretrained + forward {whole}")


if __name__ == "__main__":
    main()
