"""Shapes: their sizes, that each of them trains, and what cannot be built."""

import dataclasses
import re

import pytest
import torch
from transformers import GPTNeoXForCausalLM, LlamaForCausalLM, Olmo2ForCausalLM

from experiments.shapes import KINDS, PRESETS, ModelShape, preset
from experiments.train import train
from tests.support.training import HELD, equal

MODELS = {"olmo2": Olmo2ForCausalLM, "llama": LlamaForCausalLM, "neox": GPTNeoXForCausalLM}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_has_the_size_of_its_name(name):
    said = float(name.rpartition("-")[2].removesuffix("m")) * 1e6
    assert PRESETS[name].parameters() == pytest.approx(said, rel=0.13)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_no_matrix_of_a_preset_has_a_broken_group(name):
    shape = PRESETS[name]
    assert shape.hidden % 128 == shape.ffn % 128 == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_and_loads_as_what_it_is(tmp_path, text, kind, tied):
    shape = ModelShape(
        kind=kind, hidden=16, ffn=32, layers=2, heads=2, kv_heads=2, vocabulary=64, context=8,
        tied=tied,
    )  # fmt: skip
    run = dataclasses.replace(HELD, shape=shape, steps=2, save_at=(1, 2))
    train(run, text, tmp_path)
    first, second = (MODELS[kind].from_pretrained(tmp_path / run.label(n)) for n in (1, 2))
    assert first.config.tie_word_embeddings is tied
    assert sum(p.numel() for p in second.parameters()) == shape.parameters()
    assert not equal(first.state_dict(), second.state_dict())
    assert (
        torch.equal(second.get_input_embeddings().weight, second.get_output_embeddings().weight)
        is tied
    )


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    a, b = HELD.shape.build(1).state_dict(), HELD.shape.build(1).state_dict()
    assert equal(a, b)
    assert not equal(a, HELD.shape.build(2).state_dict())
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden": 0, "layers": 0}, "2 validation errors"),
        ({"hidden": 0}, "greater than or equal to 2"),
        ({"hidden": 130}, "`hidden` is 130; it must be a multiple of twice the 4 heads"),
        ({"kv_heads": 3}, "`kv_heads` is 3; it must divide the 4 heads"),
        ({"kind": "bert"}, "'olmo2', 'llama' or 'neox'"),
        ({"kind": "neox", "kv_heads": 2}, "neox has one for each of its 4 heads"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_what_is_allowed(changed, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        dataclasses.replace(PRESETS["olmo2-1m"], **changed)


def test_a_shape_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"there is no model `lama-1m`; did you mean `llama-1m`?"):
        preset("lama-1m")
