"""Our rtn, gptq and awq against llm-compressor's: `make peers`.

Same weights, same inputs, float32 on both sides. Its GPTQ takes scales from the original
weights (our `static_groups`) and damps by 0.01. Codes are equal but for ties: the most negative
weight of a symmetric group lies exactly between two codes, the last bit of the scale decides,
and every later column of that row follows.

Its AWQ measures one linear's own output for v -> o and up -> down, as ours does, so that the
choice must be the same. For q/k/v and gate/up it measures whole modules, as whole models show.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from qaudit.core.linears import InputsAccumulator, Linears
from qaudit.core.registry import parse_scheme
from tests.support.problems import make_problem, rows_differing
from tests.support.whole import (
    FAMILIES,
    LENGTH,
    assert_within_noise,
    divergence,
    logits,
    quantized_here,
    save,
    tokens,
)

pytestmark = pytest.mark.peers

TIES = 2  # rows, of 64 or 96


def grid_arguments(bits, group, symmetric, actorder=None):
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="channel" if group == -1 else "group",
        group_size=None if group == -1 else group,
        actorder=actorder,
    )


def fit_peer(weight_RC, arguments):
    """Return its scales and zero points of the original weights, (R, G)."""
    from compressed_tensors.quantization.utils import calculate_qparams

    rows, columns = weight_RC.shape
    parts_RGK = weight_RC.view(rows, -1, arguments.group_size or columns)
    return calculate_qparams(parts_RGK.amin(-1), parts_RGK.amax(-1), arguments)


def gptq_peer(problem, arguments, damp):
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    scale_RG, zero_RG = fit_peer(problem.weight_RC, arguments)
    hessian_CC = 2 * problem.linears.inputs.gram_CC / len(problem.x_TC)
    quantized_1RC, _, fell_back = quantize_weight(
        problem.weight_RC.clone()[None],
        hessian_CC.clone()[None],
        scale_RG[None],
        zero_RG[None],
        None,
        arguments,
        percdamp=damp,
    )
    assert not fell_back.any()
    return quantized_1RC[0]


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "actorder", "damp"),
    [
        (3, 128, True, None, 0.01),
        (4, 128, False, "weight", 0.01),
        (3, 32, False, None, 0.05),
        (4, 32, True, "weight", 0.01),
        (3, -1, True, "weight", 0.05),
        (4, -1, False, None, 0.01),
    ],
)
def test_gptq_gives_their_weights(bits, group, symmetric, actorder, damp):
    problem = make_problem(96, 512, seed=bits)
    spec = (
        f"gptq-{bits}bit:group={group}:sym={symmetric}:damp={damp}:static_groups=true"
        f":act_group_aware=false:act_order={actorder is not None}"
    )
    ours_RC = problem.solve(spec)
    theirs_RC = gptq_peer(problem, grid_arguments(bits, group, symmetric, actorder), damp)
    assert rows_differing(ours_RC, theirs_RC) <= TIES
    assert problem.objective(ours_RC) == pytest.approx(problem.objective(theirs_RC), rel=1e-3)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("rows", "columns"), [(1536, 576), (576, 1536)])
def test_the_preset_gives_their_codes_of_linears_of_a_real_size(bits, rows, columns):
    """With its default order. All but one in a thousand: after a tie a row's errors differ."""
    problem = make_problem(rows, columns, seed=bits)
    ours_RC = problem.solve(f"gptq-{bits}bit:preset=llm-compressor:group=64")
    theirs_RC = gptq_peer(problem, grid_arguments(bits, 64, True, "weight"), damp=0.01)
    equal_RC = torch.isclose(ours_RC, theirs_RC, rtol=1e-4, atol=1e-8)
    assert float((~equal_RC).float().mean()) < 1e-3


def test_the_scales_they_do_not_refit_cost_them_output_error():
    """Our default, GPTQModel's, is as good as theirs or better at the same damping."""
    problem = make_problem(96, 512)
    theirs_RC = gptq_peer(problem, grid_arguments(3, 64, True), damp=0.05)
    assert problem.objective(problem.solve("gptq-3bit:group=64")) < problem.objective(theirs_RC)


@pytest.mark.parametrize(
    ("bits", "symmetric", "group"), [(2, True, 128), (3, False, 128), (4, True, -1), (8, False, -1)]
)
def test_rtn_gives_their_weights(bits, symmetric, group):
    from compressed_tensors.quantization import fake_quantize

    problem = make_problem(64, 512)
    arguments = grid_arguments(bits, group, symmetric)
    scale_RG, zero_RG = fit_peer(problem.weight_RC, arguments)
    theirs_RC = fake_quantize(problem.weight_RC, scale_RG, zero_RG, arguments)
    ours_RC = problem.solve(f"rtn-{bits}bit:group={group}:sym={symmetric}")
    # Its symmetric scale is max / ((2^b - 1) / 2) and ours 2 max / (2^b - 1): the same number,
    # rounded once either way. No column follows another here, so ties stay single weights.
    equal_RC = torch.isclose(ours_RC, theirs_RC, rtol=1e-5, atol=1e-9)
    assert float(equal_RC.float().mean()) > 0.999


@dataclass(frozen=True)
class Search:
    """What one of its scale searches was given and what it chose."""

    weight_RC: Tensor
    x_TC: Tensor
    scale_C: Tensor
    loss: float  # summed over outputs and tokens


def oneshot_on(folder, modifiers, calibration_BT, **more):
    """Return a tiny model that its recipe quantized."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = calibration_BT.tolist()
    with pytest.MonkeyPatch.context() as patch:
        # Without an accelerator its pinning of memory fails; it changes nothing but speed.
        patch.setattr(IntermediatesCache, "pin_memory", lambda self, index: None)
        oneshot(
            model=model,
            processor=AutoTokenizer.from_pretrained(folder),
            dataset=Dataset.from_dict(
                {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
            ),
            recipe=modifiers,
            max_seq_length=LENGTH,
            num_calibration_samples=len(rows),
            shuffle_calibration_samples=False,
            **more,
        )
    return model


def search_peer(monkeypatch, folder, kv_heads):
    """Run its AWQ on a tiny Llama; return the searches of the first block by linear."""
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    searches = {}
    original = AWQModifier._compute_best_scale

    def record(self, mapping, outputs, weights):
        cache = [next(iter(batch.values())) for batch in self._parent_args_cache[mapping.parent]]
        scale_C = original(self, mapping, outputs, weights)
        if len(mapping.balance_layers) == 1:
            x_TC = torch.cat([x.flatten(0, -2) for x in cache])
            loss = self._error_metrics[-1]["best_error"] * sum(o.numel() for o in outputs)
            weight_RC = weights[mapping.balance_layers[0]].clone()
            searches[mapping.balance_names[0]] = Search(weight_RC, x_TC, scale_C, loss)
        return scale_C

    monkeypatch.setattr(AWQModifier, "_compute_best_scale", record)
    groups = {"all": {"targets": ["Linear"], "weights": grid_arguments(4, 64, False)}}
    rounding = QuantizationModifier(ignore=["lm_head"], config_groups=groups)
    oneshot_on(save(folder, "llama", kv_heads), [AWQModifier(), rounding], tokens(1), batch_size=16)
    return {
        name.rpartition(".")[2]: search for name, search in searches.items() if ".layers.0." in name
    }


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_preset_of_awq_chooses_their_scales(monkeypatch, tmp_path, kv_heads):
    searches = search_peer(monkeypatch, tmp_path, kv_heads)
    assert set(searches) == ({"o_proj", "down_proj"} if kv_heads == 4 else {"down_proj"})
    scheme = parse_scheme("awq-4bit:preset=llm-compressor:group=64:scale_dtype=float32")
    for search in searches.values():
        columns = search.x_TC.shape[1]
        inputs = InputsAccumulator(columns)
        inputs.add(search.x_TC)
        linears = Linears({"linear": search.weight_RC}, inputs.result(), torch.arange(columns))
        # Sums over 1,024 tokens in another order, and a loss that went through a float32 mean.
        assert torch.allclose(scheme.search_scales(linears), search.scale_C.float(), rtol=1e-4)
        rounded_RC = scheme.quantize(linears).weights["linear"]
        error_RT = (rounded_RC - search.weight_RC).double() @ search.x_TC.double().T
        assert float(error_RT.square().sum()) == pytest.approx(search.loss, rel=1e-3)


# ------------------------------------------------------------------------------ whole models


def whole_peer(folder, modifiers, calibration_BT):
    """Return the weights of a tiny model that its recipe quantized, norms included."""
    from compressed_tensors.quantization import fake_quantize

    model = oneshot_on(folder, modifiers, calibration_BT)
    weights = {}
    for name, module in model.named_modules():
        if ".layers." not in name or not hasattr(module, "weight"):
            continue
        weight = module.weight.detach().clone()
        if isinstance(module, torch.nn.Linear):  # GPTQ's are on their grid already
            arguments = module.quantization_scheme.weights
            weight = fake_quantize(weight, module.weight_scale, module.weight_zero_point, arguments)
        weights[name] = weight
    return weights


@pytest.mark.parametrize("family", FAMILIES)
def test_the_preset_of_gptq_is_their_whole_model_within_the_noise_of_draws(tmp_path, family):
    from llmcompressor.modifiers.gptq import GPTQModifier

    folder = save(tmp_path / "model", family)
    groups = {"all": {"targets": ["Linear"], "weights": grid_arguments(3, 64, True)}}

    def theirs(calibration_BT):
        return whole_peer(
            folder, [GPTQModifier(ignore=["lm_head"], config_groups=groups)], calibration_BT
        )

    spec = "gptq-3bit:preset=llm-compressor:group=64:scale_dtype=float32"
    assert_within_noise(folder, spec, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_preset_of_awq_is_their_whole_model(tmp_path, family):
    """With two query heads for each value head, which leaves o_proj unscaled on both sides."""
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.awq.mappings import AWQ_MAPPING_REGISTRY

    folder = save(tmp_path / "model", family)
    groups = {"all": {"targets": ["Linear"], "weights": grid_arguments(3, 64, False)}}
    # It does not know OLMo 2; OLMo 3 has the same block.
    names = {"llama": "LlamaForCausalLM", "olmo2": "Olmo3ForCausalLM"}

    scaling = AWQModifier(mappings=AWQ_MAPPING_REGISTRY[names[family]])
    rounding = QuantizationModifier(ignore=["lm_head"], config_groups=groups)
    theirs = logits(folder, whole_peer(folder, [scaling, rounding], tokens(1)))
    spec = "awq-3bit:preset=llm-compressor:group=64:scale_dtype=float32"
    ours = logits(folder, quantized_here(folder, spec, tokens(1)))
    # The same codes; it divides norms by the scales, which rounds in float32.
    assert divergence(ours, theirs) < 1e-9
