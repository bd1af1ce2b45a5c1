"""The types that differ most; `make zoo` tries all of them."""

import json

import pytest

from tests.zoo import audit, reference, tiny
from tests.zoo.__main__ import PAGE, RESULTS, report_worse
from tests.zoo.page import page

TYPES = {
    "bamba": "in blocks",  # blocks that return more than hidden states
    "bart": "refused",  # reads an encoder
    "dbrx": "in blocks",  # experts without flags
    "deepseek_v3": "in blocks",  # latent attention, groups of experts
    "gemma4_text": "in blocks",  # blocks that read keys of earlier ones, and inputs of each block
    "gemma4_unified_text": "in blocks",  # a store of keys that no layer reads
    "glm_moe_dsa": "in blocks",  # blocks that are given what the one before returned
    "jamba": "in blocks",  # mamba, attention and experts
    "longcat_flash": "in blocks",  # experts that do nothing
    "qwen3_next": "in blocks",  # linear attention
    "qwen3_vl_moe": "in blocks",  # a wrapper, experts stored as one tensor
    "zamba": "refused",  # blocks that share weights
}
# Beside others of their kind: shared keys, mamba, experts.
NIGHTLY = {"gemma4_unified_text", "jamba", "longcat_flash"}
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own, of rare types


@pytest.mark.parametrize(
    "model_type", [pytest.param(t, marks=pytest.mark.slow if t in NIGHTLY else ()) for t in TYPES]
)
def test_losses_of_a_type_are_those_of_plain_transformers(model_type):
    result = audit.result_of(model_type)
    assert result["runs"] == TYPES[model_type], result
    if result["runs"] != "refused":
        assert max(result["fp"], result["rtn"]) <= audit.TOLERANCE and result["quantized"] > 0
        # Where blocks share keys, random weights leave GPTQ nothing to gain: 1.00 to 1.02.
        assert result["gptq"] < (1.05 if model_type == "gemma4_text" else 1)


def test_another_rounding_is_wrong(monkeypatch):
    monkeypatch.setattr(reference, "rounded", lambda weight_RC: weight_RC)
    result = audit.result_of("llama")
    assert result["runs"] == "wrong" and result["fp"] <= audit.TOLERANCE < result["rtn"]


@pytest.mark.parametrize(
    ("module", "name", "runs"), [(tiny, "save", "not tried"), (audit, "_audit", "wrong")]
)
def test_a_crash_is_a_result(module, name, runs, monkeypatch):
    def crash(*_):
        raise KeyError("layers")

    monkeypatch.setattr(module, name, crash)
    assert audit.result_of("llama") == {"runs": runs, "reason": "KeyError: 'layers'"}


def test_what_ran_before_and_is_refused_now_is_reported():
    right, refused = {"runs": "in blocks"}, {"runs": "refused", "reason": "its blocks differ"}
    assert report_worse({"llama": refused}, {"llama": right}) == 0
    assert report_worse({"llama": right}, {"llama": refused}) == 1
    assert report_worse({}, {"llama": {"runs": "wrong", "reason": "losses differ"}}) == 1


def test_the_page_shows_the_results():
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(RESULTS.read_text(encoding="utf-8")))
