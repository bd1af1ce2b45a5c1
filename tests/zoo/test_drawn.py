"""Losses of edited configurations are those of plain transformers, or the file is refused."""

import random

import pytest

from tests.zoo import drawn

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own, of rare configurations

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 48,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
FULL = ["full_attention"] * 4


@pytest.mark.parametrize(
    ("model_type", "changes", "wanted"),
    [
        ("phi3", {"rope_parameters": LONG}, "equal"),
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 40}, "equal"),
        ("mistral", {"sliding_window": 8, "use_sliding_window": False}, "equal"),
        ("phi3", {"sliding_window": 8, "layer_types": FULL}, "equal"),
        ("llama", {"rms_norm_eps": 0.0}, "equal"),  # the embedding of token 0 is zero
        ("olmoe", {"output_router_logits": True}, "equal"),
        ("llama", {"return_dict": False}, "runs"),
        ("qwen2", {"sliding_window": None, "layer_types": ["sliding_attention"] * 4}, "refused"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 4}, "refused"),
        ("cohere", {"logit_scale": None}, "refused"),
        ("mistral", {"sliding_window": 8, "layer_types": FULL}, "equal"),
        ("gemma3", {"use_bidirectional_attention": True}, "refused"),
        ("falcon", {"output_attentions": True}, "equal"),
        ("doge", {"is_moe": True}, "refused"),  # its routing mixes tokens
    ],
)
def test_an_edited_configuration_is_measured_as_transformers_do_or_refused(
    model_type, changes, wanted
):
    draw = random.Random(0)
    documents = drawn.documents(draw, [80, 70, 49, 48, 41, 40, 3])
    items = drawn.options(draw, example=30, items=2)
    result = drawn.compare(model_type, changes, documents, items)
    assert result["is"] == wanted, result


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "gemma2", "olmoe", "gpt_neox"])
@pytest.mark.parametrize("seed", range(3))
def test_a_drawn_configuration_is_measured_as_transformers_do_or_refused(model_type, seed):
    result = drawn.result_of(model_type, seed)
    assert result["is"] in ("equal", "refused", "runs"), result
