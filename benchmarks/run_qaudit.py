"""One audit by qaudit's engine, in a process of its own; prints its CPU seconds as JSON.

    python -m benchmarks.run_qaudit FOLDER [quantize-only|audit|without-kl] SCHEMES

`quantize-only` sends no evaluation tokens, which leaves reading the model, the calibration
passes, the statistics and the solves. `without-kl` compares no scheme with full precision.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.clock import DEVICE, now
from benchmarks.models import CONTEXT, read_tokens
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core.registry import parse_schemes
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.tokens import Feed
from qaudit.model.blocks import BlockModel
from qaudit.planning.machine import choose_column_loop
from qaudit.types import Window
from tests.support.tiny import header_sizes


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    schemes = parse_schemes([sys.argv[3]]) if sys.argv[3] != "fp" else ()
    torch.set_num_threads(1)
    calibration, evaluation = (
        make_batches([Window(k, row) for k, row in enumerate(rows)], CONTEXT)
        for rows in read_tokens(folder)
    )
    evaluated = evaluation if what != "quantize-only" else ()
    loop, _ = choose_column_loop(DEVICE, schemes, header_sizes(folder))
    feed = Feed(calibration, evaluated, compared=what == "audit", column_loop=loop)
    dtype = getattr(torch, json.loads((folder / "config.json").read_text())["dtype"])
    device = torch.device(DEVICE)
    began = now()
    with TemporaryDirectory() as spill, HiddenStates(Path(spill), 2**34, device, 2**34) as streams:
        model = BlockModel(folder, WeightFolder(folder), dtype=dtype, device=device)
        tallies = run_blocks(model, feed, schemes, streams)
    seconds = now() - began
    result = {"seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}
    if evaluated:
        for tally, name in zip(tallies.values(), ["fp", *(s.short for s in schemes)], strict=True):
            result[f"ce {name}"] = float(torch.cat([n[:, 1:].flatten() for n in tally.nll]).mean())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
