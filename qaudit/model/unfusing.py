"""Names of experts one by one in files, for releases that store all experts of a layer together.

`transformers` reads experts one by one for most types (`conversion_mapping.py`), and exports use
the names it reads. Here are types whose own release is fused and for which runtimes name the
linears of each expert all the same:

llama4    `feed_forward.experts.3.gate_proj`: `SequentialLlama4TextExperts` of transformers 5.23
          (quantizers/base.py), which it puts in place for compressed-tensors; `Llama4LinearExperts`
          of llm-compressor (modeling/moe/llama4.py); Defuser 0.0.28, which GPTQModel 7.6 runs.

Types that are not here are refused. Of gpt-oss, gate and up alternate by row: Defuser 0.0.28 calls
the first half of these rows `gate_proj`, llm-compressor since its pull request 3100 every second
one, vLLM's loader (models/gpt_oss.py, September 2026) has names for neither, nor has transformers.
Experts of Granite and Qwen3-VL have names in llm-compressor and Defuser; a runtime that loads them
quantized was not found.
"""

from __future__ import annotations

from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

_LLAMA4 = "feed_forward.experts"


def further_converters(model_type: str) -> list[WeightConverter]:
    """Return conversions of experts one by one that the library does not have."""
    if model_type not in ("llama4", "llama4_text"):
        return []
    return [
        WeightConverter(
            [f"{_LLAMA4}.*.gate_proj.weight", f"{_LLAMA4}.*.up_proj.weight"],
            f"{_LLAMA4}.gate_up_proj",
            [MergeModulelist(dim=0), Concatenate(dim=1), Transpose(1, 2)],
        ),
        WeightConverter(
            [f"{_LLAMA4}.*.down_proj.weight"],
            f"{_LLAMA4}.down_proj",
            [MergeModulelist(dim=0), Transpose(1, 2)],
        ),
    ]
