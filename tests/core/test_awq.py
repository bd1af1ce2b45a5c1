"""AWQ against the plain search, and presets of toolchains by their published arithmetic."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qaudit.core.linears import Inputs, Linears, tf32_products
from qaudit.core.registry import parse_scheme
from qaudit.core.schemes import awq
from tests.support.filled import filled
from tests.support.pretended_device import pretended
from tests.support.reference.plain_awq import clip_and_round, round_groups, search_scale
from tests.support.whole import groups_here, save, tokens


def problem(names=("v_proj",), rows=12, columns=96, *, fold=None, seed=0, dtype=torch.float64):
    """Return linears over inputs of very different sizes, and those inputs."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((200, columns)) * np.exp(1.5 * generator.standard_normal(columns))
    x = x @ (np.eye(columns) + 0.3 * generator.standard_normal((columns, columns)) / columns**0.5)
    weights = {n: torch.from_numpy(generator.standard_normal((rows, columns))) for n in names}
    gram = torch.from_numpy(x.T @ x)
    inputs = Inputs(gram, torch.from_numpy(np.abs(x).mean(0)), len(x))
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    return Linears(weights, inputs, None if fold is None else torch.as_tensor(fold)), x


def joined(linears):
    return torch.cat(list(linears.weights.values())).numpy()


@pytest.mark.parametrize("scale_dtype", ["float32", "bf16"])
@pytest.mark.parametrize("zero_point", [True, False])
@pytest.mark.parametrize(("columns", "group"), [(96, 32), (80, 32), (64, -1)])
def test_scales_and_clipping_equal_the_plain_search(columns, group, zero_point, scale_dtype):
    fold = np.arange(columns)
    linears, x = problem(("v_proj", "up_proj"), columns=columns, fold=fold, seed=columns)
    options = {"group": group, "zero_point": zero_point}
    text = ":".join(["awq-3bit", *(f"{k}={v}" for k, v in options.items())])
    scheme = parse_scheme(f"{text}:scale_dtype={scale_dtype}")
    options["bits"] = 3
    scale = scheme.search_scales(linears).numpy()
    expected = search_scale(joined(linears), x, **options)
    np.testing.assert_allclose(scale, expected, rtol=1e-12)
    # From here on the very same scales: a clipped group lies with its ends half way between
    # two codes by construction, so that the last bit of a scale would decide about codes.
    found = scheme.quantize(linears).weights
    for name, weight in linears.weights.items():
        scaled, read = weight.numpy() * scale, x / scale
        expected = clip_and_round(scaled, read, **options, scale_dtype=scale_dtype) / scale
        # Losses come from a Gram matrix here and from outputs there: a choice between two
        # clippings can only differ where their losses agree to twelve digits or more.
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-10, atol=1e-12)


def test_grouped_query_attention_ties_the_query_heads_of_a_kv_head():
    heads, kv_heads, width = 40, 8, 4
    # Column h * width + c of the output projection reads channel c of kv head h // 5.
    shared = heads // kv_heads
    fold = np.array([(h // shared) * width + c for h in range(heads) for c in range(width)])
    linears, x = problem(("o_proj",), columns=heads * width, fold=fold, seed=5)
    scheme = parse_scheme("awq-4bit:group=32")
    scale = scheme.search_scales(linears)
    expected = search_scale(joined(linears), x, bits=4, group=32, zero_point=True, tie=fold)
    np.testing.assert_allclose(scale.numpy(), expected, rtol=1e-12)
    assert len(set(scale.tolist())) == kv_heads * width  # to the bit
    labelled = replace(linears, fold_C=torch.from_numpy(1000 - 7 * fold))  # any labels tie columns
    torch.testing.assert_close(scheme.search_scales(labelled), scale, rtol=1e-13, atol=0)


def test_without_a_place_to_fold_weights_are_clipped_only_and_a_note_says_so():
    linears, x = problem()
    scheme = parse_scheme("awq-3bit:group=32:scale_dtype=float32")
    assert scheme.search_scales(linears) is None
    quantized = scheme.quantize(linears)
    assert "nothing before these linears can take scales: clipped only" in quantized.notes
    expected = clip_and_round(joined(linears), x, bits=3, group=32, zero_point=True)
    np.testing.assert_allclose(quantized.weights["v_proj"].numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize(("scale_dtype", "width"), [("float32", 32), ("bf16", 16)])
def test_unfolded_scales_are_those_of_a_free_fold_and_are_paid_for(scale_dtype, width):
    bare, _ = problem(dtype=torch.float32)
    free, _ = problem(fold=np.arange(96), dtype=torch.float32)
    spec = f"awq-3bit:group=32:scale_dtype={scale_dtype}"
    unfolded = parse_scheme(f"{spec}:unfolded=true").quantize(bare)
    folded = parse_scheme(spec).quantize(free)
    assert unfolded.bits == folded.bits + width * 96
    assert any("unfolded" in note for note in unfolded.notes)
    assert not folded.notes
    if scale_dtype == "float32":
        assert torch.equal(unfolded.weights["v_proj"], folded.weights["v_proj"])
    else:
        scale_C = unfolded.column_scale_C
        assert torch.equal(scale_C.bfloat16().float(), scale_C)


def test_exact_folds_change_no_digit_of_what_precedes():
    linears, _ = problem(fold=np.arange(96), dtype=torch.float32, seed=4)
    quantized = parse_scheme("awq-4bit:group=32:exact_fold=true").quantize(linears)
    scale_C = quantized.column_scale_C
    assert len(set(scale_C.tolist())) > 2
    norm_C = torch.rand(96, generator=torch.Generator().manual_seed(0)).bfloat16()
    folded_C = (norm_C.float() / scale_C).bfloat16()
    assert torch.equal(folded_C.double() * scale_C, norm_C.double())


def test_queries_and_keys_are_not_clipped():
    for name, clipped in {
        "model.layers.0.self_attn.q_proj": False,
        "self_attn.k_proj": False,
        "attention.query_key_value": False,
        "self_attn.qkv_proj": False,
        "self_attn.v_proj": True,
        "self_attn.o_proj": True,
        "block_sparse_moe.experts.down_proj": True,
    }.items():
        linears, _ = problem((name,))
        both = (parse_scheme(f"awq-3bit:group=32:clip={clip}") for clip in ("true", "false"))
        with_clip, without = (scheme.quantize(linears).weights[name] for scheme in both)
        assert torch.equal(with_clip, without) != clipped, name


def test_columns_that_never_see_an_input_do_not_break_the_search():
    linears, x = problem(columns=64, fold=np.arange(64))
    x[:, 10] = 0
    inputs = Inputs(torch.from_numpy(x.T @ x), torch.from_numpy(np.abs(x).mean(0)), len(x))
    given = Linears(linears.weights, inputs, linears.fold_C)
    found = parse_scheme("awq-4bit:group=32").quantize(given)
    assert torch.isfinite(found.weights["v_proj"]).all()


def test_clipping_takes_every_nth_token_of_all_batches_where_modules_are_compared():
    linears, x = problem(seed=4)
    x = np.tile(x, (6, 1))[:1100] * np.linspace(0.5, 2, 1100)[:, None]
    inputs = Inputs(torch.from_numpy(x.T @ x), torch.from_numpy(np.abs(x).mean(0)), len(x))
    parts = [torch.from_numpy(one) for one in np.split(x, [333, 334, 800])]
    told = replace(linears, inputs=inputs, tokens=lambda: iter(parts))
    found = parse_scheme("awq-3bit:group=32:scale_dtype=float32").quantize(told).weights["v_proj"]
    options = {"bits": 3, "group": 32, "zero_point": True}
    expected = clip_and_round(linears.weights["v_proj"].numpy(), x[::2], **options)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [2**13, 1], ids=["some rows", "a row"])
def test_a_gpu_tries_candidates_together_and_chooses_the_same(chunk, monkeypatch):
    shape = {"rows": 40, "columns": 80, "fold": np.arange(80), "dtype": torch.float32}
    linears, _ = problem(("v_proj", "up_proj"), **shape)
    scheme = parse_scheme("awq-3bit:group=32")
    expected = scheme.quantize(linears)
    monkeypatch.setattr(awq, "GPU_CHUNK", chunk)
    with pretended():
        inputs = linears.inputs
        moments = (inputs.gram_CC.to("cuda"), inputs.absmean_C.to("cuda"), inputs.tokens)
        weights = {name: weight.to("cuda") for name, weight in linears.weights.items()}
        there = Linears(weights, Inputs(*moments), linears.fold_C.to("cuda"))
        quantized = scheme.quantize(there)
        assert torch.equal(quantized.column_scale_C.cpu(), expected.column_scale_C)
        for name, weight in expected.weights.items():
            assert torch.equal(quantized.weights[name].cpu(), weight)


def test_a_gpu_multiplies_in_tf32_and_the_setting_is_put_back():
    settings = torch.backends.cuda.matmul
    with tf32_products(torch.ones(1)):
        assert not settings.allow_tf32
    with pretended():
        weight = torch.ones(1, device="cuda")
        with pytest.raises(ZeroDivisionError), tf32_products(weight):
            assert settings.allow_tf32
            raise ZeroDivisionError
        assert not settings.allow_tf32


# --------------------------------------------------------------------------------------------------
# Presets: the searches of tools, multiplied out on the inputs of whole blocks.


FOLDED = {  # the first linears of the groups whose inputs can be divided
    "llama": {"q_proj", "gate_proj", "down_proj"},  # o_proj: 4 query heads read 2 value heads
    "olmo2": {"down_proj"},
}
RATIOS = {
    "autoawq": [step / 20 for step in range(20)],
    "llm-compressor": [None, *(step / 18 for step in range(19))],
}


@cache
def block(folder):
    """Return a model's first block by group, in double precision: linears, inputs and fold."""
    text = tokens(1)[:4]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    inputs = {}
    for name, module in model.model.layers[0].named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, x, name=name: inputs.update({name: x[0]}))
    with torch.no_grad():
        model(text)
    groups = {}
    for linears, _ in groups_here(folder, "awq-4bit:group=64", text):
        first = next(iter(linears.weights))
        if linears.block == 0:
            x = inputs[first].flatten(0, 1).numpy()
            gram_CC, absmean_C = torch.from_numpy(x.T @ x), torch.from_numpy(np.abs(x).mean(0))
            weights = {name: weight.double() for name, weight in linears.weights.items()}
            moments = Inputs(gram_CC, absmean_C, len(x))
            name = first.rpartition(".")[2]
            groups[name] = replace(linears, weights=weights, inputs=moments), x
    assert set(groups) == {"q_proj", "o_proj", "gate_proj", "down_proj"}
    return groups


@pytest.mark.parametrize(
    ("family", "tool"), [*(("llama", tool) for tool in RATIOS), ("olmo2", "llm-compressor")]
)
def test_awq_searches_a_block_as_its_tool_does(family, tool, once):
    groups, folded = block(once(save, family)), FOLDED[family]
    scheme = parse_scheme(f"awq-4bit:preset={tool}:group=64:scale_dtype=float32")
    grid = {"bits": 4, "group": 64, "zero_point": True}
    for first, (linears, x) in filled(groups.items()):
        found, quantized = scheme.search_scales(linears), scheme.quantize(linears)
        assert (found is not None) == (first in folded)
        scale = np.ones(x.shape[1])
        if found is not None:
            joined = torch.cat(list(linears.weights.values())).numpy()
            scale = search_scale(joined, x, **grid, ratios=RATIOS[tool])
            # A sum over tokens in another order; no two ratios have losses as near as that.
            np.testing.assert_allclose(found, scale, rtol=1e-12)
            scale = found.numpy()
        for name, weight in linears.weights.items():
            scaled = weight.numpy() * scale
            if tool == "llm-compressor" or name.endswith(("q_proj", "k_proj")):
                expected = round_groups(scaled, **grid)
            else:
                expected = clip_and_round(scaled, x / scale, **grid)
            # The same arithmetic on the same scales: the codes are equal, and each product is
            # rounded alike but for the last division.
            np.testing.assert_allclose(quantized.weights[name], expected / scale, rtol=1e-12)
