"""What eight quantized files of one base cost in one pass, beside transformers once for each.

    python -m benchmarks.shipped [--shape 15M] [--files 8] [--windows 4]

The files are compressed-tensors files of a random model, rounded to 2 to 8 bits. Ours is one pass:
the base and every file side by side, tensors decoded one at a time, KL divergence from logits that
are not stored. Theirs is what llama.cpp and others do, with transformers: load the base, run it,
write its logits in half precision; then for each file load it, run it, read the logits and compare.
Seconds are the processor's, on one thread, without imports; bytes are those of weights that are
read and of logits that are written and read. Files are made before, and not counted.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from benchmarks.clock import print_machine
from benchmarks.models import SHAPES, make_model, read_tokens
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.fidelity import Reference
from qaudit.core.linears import Linears
from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Shipped
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.shipped import open_shipped
from qaudit.engine.tokens import Feed
from qaudit.formats.packing import format_named
from qaudit.model.blocks import BlockModel
from qaudit.types import Window

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="15M")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--windows", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_machine()
    shape = SHAPES[options.shape]
    with TemporaryDirectory() as temporary:
        base = Path(temporary) / "base"
        make_model(base, shape, "float32")
        tokens = read_tokens(base)[1][: options.windows]
        files = [
            write_file(base, Path(temporary) / f"file{k}", f"rtn-{2 + k % 7}bit", shape.group)
            for k in range(options.files)
        ]
        measure(base, files, tokens)


def write_file(base: Path, folder: Path, scheme: str, group: int) -> Path:
    """Write a copy of a model with its linears rounded, as compressed-tensors."""
    one = parse_scheme(f"{scheme}:group={group}:sym=true")
    form = format_named("compressed-tensors", one)
    tensors: dict[str, Tensor] = {}
    for name, tensor in safetensors.torch.load_file(base / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        linear = name.removesuffix(".weight")
        tensors |= form.pack(linear, one.quantize(Linears({"a": tensor})).stored["a"])
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = form.config(("lm_head",), symmetric=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(base: Path, files: list[Path], tokens: np.ndarray) -> None:
    """Print passes, loads, processor seconds and bytes of both ways."""
    own, own_seconds = ours(base, files, tokens)
    their, their_seconds, logits_nbytes = theirs(base, files, tokens)
    weights = sum(nbytes(folder) for folder in (base, *files))
    moved = weights + (len(files) + 1) * logits_nbytes
    apart = max(abs(a - b) / b for a, b in zip(own, their, strict=True))
    print(f"{len(files)} files, {tokens.size} tokens; KL divergences differ by {apart:.1%} at most")
    print(f"{'':22}{'transformers':>14}{'qaudit':>12}{'times':>8}")
    rows = [
        ("forward passes", len(files) + 1, len(files) + 1),
        ("loads of a model", len(files) + 1, 0),
        ("processor seconds", their_seconds, own_seconds),
        ("MB of logits, a file", logits_nbytes / 1e6, 0.0),
        ("MB read and written", moved / 1e6, weights / 1e6),
    ]
    for name, a, b in rows:
        print(f"{name:22}{a:14.1f}{b:12.1f}{f'{a / b:8.2f}' if b else ''}")


def nbytes(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def ours(base: Path, files: list[Path], tokens: np.ndarray) -> tuple[list[float], float]:
    """Return the mean KL divergence of every file, and the seconds of the one pass."""
    began = time.process_time()
    weights = WeightFolder(base)
    model = BlockModel(base, weights, dtype=torch.float32, device=CPU)
    schemes = [
        Shipped(file=one.name, format="compressed-tensors", bits=4, sha256="0" * 64)
        for one in files
    ]
    names = frozenset(weights.names())
    openers = {
        scheme.spec: partial(open_shipped, scheme, file, base, names)
        for scheme, file in zip(schemes, files, strict=True)
    }
    windows = [Window(k, row) for k, row in enumerate(tokens)]
    feed = Feed((), make_batches(windows, tokens.shape[1]), shipped=openers)
    with TemporaryDirectory() as spill, HiddenStates(Path(spill), 2**33, CPU) as states:
        tallies = run_blocks(model, feed, schemes, states)
    seconds = time.process_time() - began
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    return [float(sum(kl.sum() for kl in tallies[s.spec].kl)) / count for s in schemes], seconds


@torch.no_grad()
def theirs(base: Path, files: list[Path], tokens: np.ndarray) -> tuple[list[float], float, int]:
    """Return the same by transformers, and the bytes of the file of logits."""
    began = time.process_time()
    path = base / "logits.npy"
    model = loaded(base)
    np.save(path, np.stack([logits(model, row).half().numpy() for row in tokens]))
    del model
    means = []
    for file in files:
        model, stored = loaded(file), np.load(path, mmap_mode="r")
        total = 0.0
        for row, base_TV in zip(tokens, stored, strict=True):
            full_TV, targets_T = torch.from_numpy(np.array(base_TV)).float(), torch.from_numpy(row)
            compared = Reference.of(full_TV, targets_T[1:].long()).compare(
                logits(model, row), targets_T[1:].long()
            )
            assert compared.kl_N is not None
            total += float(compared.kl_N.sum())
        means.append(total / (tokens.shape[0] * (tokens.shape[1] - 1)))
        del model
    return means, time.process_time() - began, path.stat().st_size


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(action="ignore"):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any, row: np.ndarray) -> Tensor:
    """Return the logits behind every token but the last."""
    out: Tensor = model(input_ids=torch.from_numpy(row).long()[None], use_cache=False).logits
    return out[0, :-1]


if __name__ == "__main__":
    main()
