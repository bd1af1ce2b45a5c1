"""One plain evaluation by transformers, in a process of its own; prints CPU seconds as JSON.

    python -m benchmarks.run_transformers FOLDER BATCH...

The model is loaded, and for each batch size the evaluation windows go through it once with
`labels`, as its documentation shows. Loading is not counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.clock import DEVICE, now
from benchmarks.models import read_tokens


@torch.no_grad()
def evaluate(model: torch.nn.Module, tokens_NT: torch.Tensor, batch: int) -> tuple[float, float]:
    """Return the CPU seconds of one pass, and the mean loss."""
    began, total = now(), 0.0
    for rows_BT in tokens_NT.split(batch):
        loss = model(input_ids=rows_BT, labels=rows_BT, use_cache=False).loss
        total += float(loss) * len(rows_BT)
    return now() - began, total / len(tokens_NT)


def main() -> None:
    folder, batches = Path(sys.argv[1]), [int(text) for text in sys.argv[2:]]
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval().to(DEVICE)
    tokens_NT = torch.from_numpy(read_tokens(folder)[1].astype("int64")).to(DEVICE)
    result = {}
    for batch in batches:
        result[f"evaluate {batch}"], result["ce"] = evaluate(model, tokens_NT, batch)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
