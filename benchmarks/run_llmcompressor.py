"""One quantization and evaluation by llm-compressor, in its own environment; JSON as the rest.

    .peers/llmcompressor/bin/python -m benchmarks.run_llmcompressor FOLDER SCHEME GROUP BATCH...

The first batch size is that of calibration; the quantized model is evaluated as it lies in
memory, once for each batch size. Loading and saving are not counted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from loguru import logger
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.clock import DEVICE, now
from benchmarks.models import CONTEXT, read_tokens
from benchmarks.run_transformers import evaluate


def recipe(scheme: str, group: int) -> object:
    """Return llm-compressor's words for `gptq-4bit` and the like."""
    name, bits = scheme.partition("bit")[0].split("-")
    weights = QuantizationArgs(
        num_bits=int(bits), type="int", symmetric=True, strategy="group", group_size=group
    )
    groups = {"all": QuantizationScheme(targets=["Linear"], weights=weights)}
    ignore = ["lm_head", "re:.*mlp.gate$"]
    if name == "gptq":
        return GPTQModifier(config_groups=groups, ignore=ignore, actorder=None)
    return QuantizationModifier(config_groups=groups, ignore=ignore)


def main() -> None:
    folder, scheme, group = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    batches = [int(text) for text in sys.argv[4:]]
    logger.remove()
    torch.set_num_threads(1)
    calibration, evaluation = read_tokens(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(DEVICE)
    linearize_moe(model)  # nothing to do for a dense one
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>"
    )
    given = {}
    if scheme.startswith("gptq"):
        rows = calibration.tolist()
        masks = [[1] * CONTEXT] * len(rows)
        given = {
            "dataset": Dataset.from_dict({"input_ids": rows, "attention_mask": masks}),
            "max_seq_length": CONTEXT,
            "num_calibration_samples": len(rows),
            "shuffle_calibration_samples": False,
            "batch_size": batches[0],
        }
    if "bit-" in scheme:  # of a mixture of experts: routed, or all
        given["moe_calibrate_all_experts"] = scheme.endswith("-all")
    began = now()
    oneshot(model=model, processor=tokenizer, recipe=recipe(scheme, group), **given)
    result = {"quantize": now() - began}
    tokens_NT = torch.from_numpy(evaluation.astype("int64")).to(DEVICE)
    for batch in batches:
        result[f"evaluate {batch}"], result["ce"] = evaluate(
            model.eval().to(DEVICE), tokens_NT, batch
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
