"""Our awq, hqq and qronos against AutoAWQ's, the hqq package's and Brevitas' own: `make peers`."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from qaudit.core.grid import fit, split_groups
from qaudit.core.linears import Inputs, InputsAccumulator, Linears
from qaudit.core.registry import parse_scheme
from tests.support.problems import make_problem
from tests.support.whole import FAMILIES, assert_within_noise, save

pytestmark = pytest.mark.peers

# --------------------------------------------------------------------------------------- hqq


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_hqq_gives_their_codes_scales_and_zero_points(bits):
    from hqq.core.quantize import Quantizer

    generator = torch.Generator().manual_seed(bits)
    weight_RC = 0.05 * torch.randn(96, 192, generator=generator).exp() - 0.05
    # As its linears call it: at 4 bits zero points start from whole numbers.
    codes_GK, meta = Quantizer.quantize(
        weight_RC,
        nbits=bits,
        group_size=64,
        axis=1,
        round_zero=bits == 4,
        bitpack=False,
        device="cpu",
    )
    scheme = parse_scheme(f"hqq-{bits}bit:group=64:scale_dtype=float32")
    stored = scheme.quantize(Linears({"linear": weight_RC})).stored["linear"]
    assert torch.equal(stored.codes_RC, codes_GK.view(96, 192).to(torch.uint8))
    assert torch.equal(stored.scales_RG, meta["scale"].view(96, 3))
    # Its groups are rows of one matrix, ours a third dimension: means may add in another order.
    assert torch.allclose(stored.zeros_RG, meta["zero"].view(96, 3), rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------ Qronos


def qronos_peer(weight_RC, own_TC, full_TC, scheme):
    """Return what Brevitas makes of a weight on our grid; its own has scales of max / 2^(b-1)."""
    from brevitas.graph.gpxq import LayerHandler
    from brevitas.graph.qronos import Qronos
    from brevitas.utils.torch_utils import StopFwdException

    grids = [
        fit(part_RGK, scheme.bits, symmetric=scheme.sym, dim=-1)
        for part_RGK in split_groups(weight_RC, scheme.group)
    ]

    def snap(now_RC):
        parts = zip(grids, split_groups(now_RC, scheme.group), strict=True)
        return torch.cat([grid.snap(part_RGK).flatten(1) for grid, part_RGK in parts], dim=1)

    class OnOurGrid(Qronos):
        def get_quant_weights(self, i, i1, permutation_list, with_quant_history=False):
            (order_C,) = permutation_list
            ordered_1RC = snap(self.layer.weight.data)[None][:, :, order_C]
            return ordered_1RC[:, :, : i1 + i] if with_quant_history else ordered_1RC[:, :, i1 + i]

    layer = nn.Linear(*reversed(weight_RC.shape), bias=False, dtype=weight_RC.dtype)
    layer.weight.data = weight_RC.clone()
    layer.weight_quant = SimpleNamespace(is_quant_enabled=True, requires_quant_input=False)
    solver = OnOurGrid(
        layer, "linear", scheme.act_order, 1, True, alpha=scheme.damp, dtype=weight_RC.dtype
    )
    for quantized, x_TC in ((True, own_TC), (False, full_TC)):
        layer.weight_quant.is_quant_enabled = quantized
        with pytest.raises(StopFwdException):
            solver.update_batch(layer, (x_TC,), LayerHandler())
    solver.single_layer_update()
    return snap(layer.weight.data)


@pytest.mark.parametrize(
    ("bits", "group", "act_order"), [(4, 64, False), (3, -1, True), (3, 32, True), (4, -1, False)]
)
def test_qronos_gives_their_weights(bits, group, act_order):
    problem = make_problem(96, 256, seed=bits)
    weight_RC, own_TC = problem.weight_RC.double(), problem.x_TC.double()
    noise_TC = torch.randn(own_TC.shape, generator=torch.Generator().manual_seed(5)).double()
    full_TC = own_TC + 0.1 * own_TC.abs().mean(0) * noise_TC
    scheme = parse_scheme(
        f"qronos-{bits}bit:group={group}:static_groups=true:scale_dtype=float32"
        f":act_group_aware=false:act_order={act_order}"
    )
    inputs = Inputs(
        own_TC.T @ own_TC, own_TC.abs().mean(0), len(own_TC), drift_CC=(full_TC - own_TC).T @ own_TC
    )
    ours_RC = scheme.quantize(Linears({"linear": weight_RC}, inputs)).weights["linear"]
    # Power iterations start from other vectors, so that damping differs in the third digit of a
    # millionth; in double precision no target is as near to a tie as that moves it.
    theirs_RC = qronos_peer(weight_RC, own_TC, full_TC, scheme)
    assert torch.allclose(ours_RC, theirs_RC, rtol=1e-12, atol=0)


# ----------------------------------------------------------------------------------- AutoAWQ


class Together(nn.Module):
    """Linears that read one input, as a module whose output is theirs."""

    def __init__(self, weights):
        super().__init__()
        self.linears = nn.ModuleList()
        for weight_RC in weights:
            linear = nn.Linear(*reversed(weight_RC.shape), bias=False)
            linear.weight = nn.Parameter(weight_RC.clone(), requires_grad=False)
            self.linears.append(linear)

    def forward(self, x_TC):
        return torch.cat([linear(x_TC) for linear in self.linears], dim=1)


def autoawq(bits, group):
    """Return its quantizer without a model."""
    from awq.quantize.quantizer import AwqQuantizer

    quantizer = AwqQuantizer.__new__(AwqQuantizer)
    quantizer.w_bit, quantizer.group_size, quantizer.zero_point = bits, group, True
    quantizer.duo_scaling, quantizer.max_chunk_memory = True, 2**30
    quantizer.n_parallel_calib_samples = None
    return quantizer


@pytest.fixture
def copies(monkeypatch):
    """Let `.cpu()` copy, as from a GPU: their search keeps weights by it before it scales them."""
    monkeypatch.setattr(Tensor, "cpu", Tensor.clone)


@pytest.mark.parametrize("bits", [3, 4])
def test_awq_gives_their_scales_and_weights(copies, bits):
    first, second = make_problem(128, 256, seed=bits), make_problem(64, 256, seed=bits + 10)
    x_TC = first.x_TC[:512]  # it clips on 512 tokens, ours on all there are
    weights = {"v_proj": first.weight_RC, "up_proj": second.weight_RC}
    inputs = InputsAccumulator(256)
    inputs.add(x_TC)
    linears = Linears(weights, inputs.result(), torch.arange(256))
    scheme = parse_scheme(f"awq-{bits}bit:preset=autoawq:group=64:scale_dtype=float32")

    theirs, together = autoawq(bits, 64), Together(list(weights.values()))
    _, _, scale_C = theirs._search_best_scale(
        together, together.linears[0], list(together.linears), x_TC, together
    )
    # The same choice of 20; means over tokens and rows add in another order.
    assert torch.allclose(scheme.search_scales(linears), scale_C, rtol=1e-5)
    quantized = scheme.quantize(linears)
    for name, weight_RC in weights.items():
        scaled_RC = weight_RC * scale_C
        bound_RG1 = theirs._compute_best_clip(scaled_RC, x_TC / scale_C)
        clipped_RC = scaled_RC.view(len(weight_RC), -1, 64).clamp(-bound_RG1, bound_RG1).flatten(1)
        theirs_RC = theirs.pseudo_quantize_tensor(clipped_RC)[0] / scale_C
        ours_RC = quantized.weights[name]
        same = torch.isclose(ours_RC, theirs_RC, rtol=1e-4, atol=1e-7).view(-1, 64).all(1)
        # Errors of two clippings may be equal to float32's last digits, and the ends of a clipped
        # group lie half way between two codes.
        assert float(same.float().mean()) > 0.97


@pytest.mark.parametrize("family", FAMILIES)
def test_awq_is_their_whole_model(copies, monkeypatch, tmp_path, family):
    """With two query heads for each value head, which leaves o_proj unscaled on both sides."""
    from awq.models.llama import LlamaAWQForCausalLM
    from awq.quantize import quantizer
    from transformers import AutoModelForCausalLM

    class Maps(LlamaAWQForCausalLM):
        model_type = "llama"

        def __init__(self):
            """Hold what it asks about the blocks of a model, and no model."""

        @staticmethod
        def get_layers_for_scaling(block, inputs, arguments):
            maps = LlamaAWQForCausalLM.get_layers_for_scaling
            # It does not know OLMo 2, where nothing before attention and gate can be divided.
            after_gate = {"prev_op": block.mlp.up_proj, "layers": [block.mlp.down_proj]}
            down = [{**after_gate, "inp": inputs["mlp.down_proj"]}]
            return maps(block, inputs, arguments) if family == "llama" else down

    def theirs(calibration_BT):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model.config.use_cache = False
        rows = [row_T[None] for row_T in calibration_BT]
        monkeypatch.setattr(quantizer, "get_calib_dataset", lambda **_: rows)
        settings = (3, 64, True, "gemm", "", "", "", True)
        # What it packs is in float16; this stops where weights are scaled and clipped.
        solver = quantizer.AwqQuantizer(Maps(), model, None, *settings, export_compatible=True)
        solver.quantize()
        return {
            name: solver.pseudo_quantize_tensor(module.weight.data)[0]
            if isinstance(module, nn.Linear)
            else module.weight.data
            for name, module in model.named_modules()
            if ".layers." in name and hasattr(module, "weight")
        }

    folder = save(tmp_path / "model", family)
    spec = "awq-3bit:preset=autoawq:group=64:scale_dtype=float32"
    # It divides the rows of up_proj by the scales of down_proj before it rounds them; the ends of a
    # clipped group lie half way between two codes, so that the last bit decides some codes.
    assert_within_noise(folder, spec, theirs, share=0.1)
