import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.registry import DEFAULT_SCHEMES, parse_schemes
from qaudit.engine.price import Load, Sizes, flops, memory_nbytes
from qaudit.errors import ModelError
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
