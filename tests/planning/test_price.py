from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.registry import parse_schemes
from qaudit.errors import ModelError
from qaudit.planning import price
from qaudit.planning.memory import memory_nbytes, what_would_fit
from qaudit.planning.price import (
    ROUND_TOKENS,
    Load,
    Sizes,
    flops,
)
from qaudit.planning.scratch import Scratch
from qaudit.settings import DEFAULT_SCHEMES
from qaudit.types import Protocol


def shapes(hidden=64, ffn=160, blocks=3, vocabulary=1000, tied=True):
    found = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not tied:
        found["lm_head.weight"] = (vocabulary, hidden)
    for i in range(blocks):
        found[f"model.layers.{i}.self_attn.q_proj.weight"] = (hidden, hidden)
        found[f"model.layers.{i}.mlp.down_proj.weight"] = (hidden, ffn)
    return found


def load(schemes=DEFAULT_SCHEMES, documents=8):
    protocol = Protocol(128, 128, evaluation_documents=documents, calibration_documents=documents)
    return Load.of(protocol, parse_schemes(schemes))


def test_sizes_are_read_from_names_and_shapes_alone():
    sizes = Sizes.of(shapes(), "model")
    assert sizes.blocks == 3
    assert sizes.block_parameters == 64 * 64 + 64 * 160
    assert sizes.rest_parameters == 1000 * 64 + 64
    assert sizes.parameters == sizes.rest_parameters + 3 * sizes.block_parameters
    assert (sizes.hidden, sizes.widest, sizes.vocabulary) == (64, 160, 1000)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ModelError, match="no numbered blocks"):
        Sizes.of({"weight": (3, 3)}, "thing")


def test_calibrating_schemes_are_told_apart():
    assert load().own_streams == 2  # gptq at 4 and 3 bits
    assert load().shared_calibration  # awq
    assert not load(("rtn-4bit",)).shared_calibration


@given(st.integers(2, 60), st.integers(2, 60))
def test_memory_does_not_grow_with_depth(few, many):
    a, b = (Sizes.of(shapes(blocks=n), "model") for n in (few, many))
    assert memory_nbytes(a, load(), 4, 10**9) == memory_nbytes(b, load(), 4, 10**9)


@given(st.integers(1, 10**9))
def test_a_limit_on_streams_bounds_memory(limit):
    sizes = Sizes.of(shapes(), "model")
    # three stages, and unspilled runs keep what each of them held
    assert memory_nbytes(sizes, load(), 4, limit) <= 3 * memory_nbytes(sizes, load(), 4, 0) + limit


def test_more_documents_and_more_schemes_cost_more():
    sizes = Sizes.of(shapes(), "model")
    assert flops(sizes, load(documents=16)) > flops(sizes, load(documents=8))
    assert flops(sizes, load()) > flops(sizes, load(("rtn-4bit",)))
    # Rounding activations, and a second stream of calibration, are arithmetic too.
    assert flops(sizes, load(("mxfp4",))) > flops(sizes, load(("mxfp4a16",)))
    assert flops(sizes, load(("gptaq-4bit",))) > flops(sizes, load(("gptq-4bit",)))
    asked, alone = load(("gptaq-4bit",)), load(("gptq-4bit",))
    assert memory_nbytes(sizes, asked, 4, 10**9) > memory_nbytes(sizes, alone, 4, 10**9)


@pytest.mark.parametrize(
    ("spec", "calibrating", "grams"),
    [("rtn-4bit", 0, 0), ("gptq-4bit", 1, 1), ("gptaq-4bit", 2, 1)],
)
def test_products_are_those_that_a_pass_multiplies(spec, calibrating, grams, monkeypatch):
    for name in ("ATTENTION", "ELEMENTWISE", "LOGIT"):
        monkeypatch.setattr(price, name, 0.0)
    sizes, asked = Sizes.of(shapes(), "model"), load((spec,))
    tokens = asked.evaluation_tokens  # as many calibrate
    rows = {"q": (64, 64), "down": (64, 160)}
    block = sum(2 * tokens * a * b for a, b in rows.values())
    gram = 2 * tokens * (3 * 64**2 + 160**2)
    drift = gram if spec == "gptaq-4bit" else 0
    expected = (2 + calibrating) * 3 * block + 2 * 2 * tokens * 64 * 1000
    expected += 3 * (9 / 16 * grams * gram + drift)
    assert asked.calibration_tokens == tokens
    assert flops(sizes, asked) == pytest.approx(expected)


def test_searches_and_activations_are_priced_by_what_they_work_on():
    sizes = Sizes.of(shapes(), "model")
    weights = 3 * sizes.block_parameters
    plain, searched = load(("quarot-rtn-4bit:search=false",)), load(("quarot-rtn-4bit",))
    trials = flops(sizes, searched) - flops(sizes, plain)
    assert trials == pytest.approx(80 * weights * price.TRIAL)
    rounded = flops(sizes, load(("fp8",))) - flops(sizes, load(("rtn-4bit",)))
    read = plain.evaluation_tokens * 3 * (3 * 64 + 160)
    assert rounded == pytest.approx(read * price.ROUNDING)


def test_learning_costs_time_by_its_steps_and_memory_for_gradients():
    sizes = Sizes.of(shapes(), "model")
    few, many, unlearned = (
        load((text,)) for text in ("ostquant-4bit:steps=3", "ostquant-4bit", "quarot-4bit")
    )
    assert flops(sizes, many) - flops(sizes, few) == pytest.approx(
        147 * (flops(sizes, few) - flops(sizes, load(("ostquant-4bit:steps=2",))))
    )
    assert flops(sizes, few) > flops(sizes, unlearned)
    assert memory_nbytes(sizes, few, 4, 10**9) > memory_nbytes(sizes, unlearned, 4, 10**9)
    assert memory_nbytes(sizes, few, 4, 10**9) == memory_nbytes(sizes, many, 4, 10**9)


@pytest.mark.parametrize("cores", [1, 2, 64, 192])
def test_a_time_is_an_order_of_magnitude_on_any_number_of_cores(cores, monkeypatch):
    monkeypatch.setattr(price, "matmul_rate", lambda: 1e11)
    monkeypatch.setattr(price.psutil, "cpu_count", lambda: cores)
    low, high = price.seconds_range(1e15, "cpu", "float32")
    assert 0 < low < high <= 4 * low
    assert 1e4 / cores <= low <= 1e4
    assert price.seconds_range(2e15, "cpu", "float32") == pytest.approx((2 * low, 2 * high))


def test_a_gpu_is_not_priced_by_the_cores_beside_it(monkeypatch):
    monkeypatch.delattr(price, "matmul_rate")
    (low, high), (wide, _) = (
        price.seconds_range(1e15, "cuda", dtype) for dtype in ("bfloat16", "float32")
    )
    assert low < high <= 4 * low
    assert wide > low


# ------------------------------------------------------------------------- where memory is short


def long_load(documents):
    protocol = Protocol(128, 128, evaluation_documents=8, calibration_documents=documents)
    return Load.of(protocol, parse_schemes(DEFAULT_SCHEMES))


@given(st.integers(2, 400), st.integers(0, 10**7), st.floats(0.05, 0.99))
def test_what_would_fit_fits_and_a_document_more_does_not(documents, limit, share):
    sizes, asked = Sizes.of(shapes(), "model"), long_load(documents)
    available = int(share * memory_nbytes(sizes, asked, 4, limit))
    lower, fewer = what_would_fit(sizes, asked, documents, 4, limit, available)
    if lower is not None:
        assert 0 < lower <= limit
        assert memory_nbytes(sizes, asked, 4, lower) <= available
    if fewer is not None:
        assert 1 <= fewer < documents
        assert memory_nbytes(sizes, long_load(fewer), 4, limit) <= available
        if fewer + 1 < documents:
            assert memory_nbytes(sizes, long_load(fewer + 1), 4, limit) > available
    elif lower is None:
        assert memory_nbytes(sizes, long_load(1), 4, limit) > available


def test_nothing_is_proposed_where_one_block_is_too_large():
    sizes = Sizes.of(shapes(), "model")
    assert what_would_fit(sizes, load(), 8, 4, 10**9, 1000) == (None, None)


# --------------------------------------------------------------------------- without any header


@pytest.mark.parametrize("tied", [False, True])
def test_a_configuration_tells_nearly_what_headers_tell(tied):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config)
    names = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert Sizes.of_config(config.to_dict(), "m") == Sizes.of(names, "m")


@pytest.mark.parametrize("config", [{}, {"hidden_size": "wide"}, {"hidden_size": -1}])
def test_a_configuration_that_tells_nothing_is_refused(config):
    with pytest.raises(ModelError, match=r"is not defined by its `config\.json`"):
        Sizes.of_config(config, "m")


def test_tasks_of_a_7b_say_what_their_rounds_take_of_the_disk() -> None:
    sizes = Sizes(7 * 10**9, 32, 2 * 10**8, 6 * 10**8, 4096, 11008, 32000)
    schemes = parse_schemes(["rtn-4bit", "gptq-4bit", "gptq-3bit"])
    load = replace(Load.of(Protocol(2048, 2048), schemes), item_tokens=21_000_000)
    (note,) = Scratch.of(sizes, load, schemes, 2, 10**9).notes
    assert "about 21 rounds of 1 M tokens" in note
    assert "quantized weights between rounds 25.6 GB" in note  # two of 12.8 GB: rtn needs none
    assert "hidden states beyond the memory for them 48.5 GB" in note
    small = replace(load, item_tokens=900_000)
    assert Scratch.of(sizes, small, schemes, 2, 10**9).notes == ()
    bound = memory_nbytes(sizes, load, 2, 10**15)
    assert bound == memory_nbytes(sizes, replace(load, item_tokens=ROUND_TOKENS), 2, 10**15)
