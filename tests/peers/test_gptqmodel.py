"""Our gptq, rtn and awq's clipping against GPTQModel's own classes: `make peers`.

Same weights, same inputs, float32 on both sides. What must be equal is every code, with one
exception: the most negative weight of a symmetric group lies exactly between the codes -2^(b-1)
and -2^(b-1) + 1, because the scale is 2 max|w| / (2^b - 1); the last bit of the scale decides.
A code decided otherwise moves every later column of its row, so whole rows differ or none do.
Asymmetric grids have no such tie.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from qaudit.core.linears import InputsAccumulator, Linears
from qaudit.core.registry import parse_scheme
from tests.support.problems import Problem, make_problem, rows_differing
from tests.support.whole import FAMILIES, assert_within_noise, save

pytestmark = pytest.mark.peers

ORDERS = {
    "natural": "act_group_aware=false",
    "group_aware": "act_group_aware=true",
    "act_order": "act_order=true:act_group_aware=false",
    "static": "static_groups=true:act_group_aware=false",
    "static_act_order": "static_groups=true:act_order=true:act_group_aware=false",
}
TIES = 2  # rows, of 64 or 96: more than were ever seen


def config_of(bits, group, sym, **more):
    from gptqmodel.quantization.config import GPTQConfig

    sizes = {"bits": bits, "group_size": group, "sym": sym}
    return GPTQConfig(**{**sizes, "act_group_aware": False, "offload_to_disk": False, **more})


def linear_of(problem):
    linear = torch.nn.Linear(*reversed(problem.weight_RC.shape), bias=False)
    linear.weight.data = problem.weight_RC.clone()
    return linear


def solve_peer(problem, spec):
    """Return GPTQModel's dequantized weights and the damping it ended with."""
    from gptqmodel.quantization import GPTQ

    scheme = parse_scheme(spec)
    names = ("act_group_aware", "static_groups")
    config = config_of(
        scheme.bits, scheme.group, scheme.sym, desc_act=scheme.act_order, damp_percent=scheme.damp,
        damp_auto_increment=scheme.damp_increment, **{name: getattr(scheme, name) for name in names}
    )  # fmt: skip
    solver = GPTQ(linear_of(problem), config)
    solver.quantizer.configure(perchannel=True)
    solver.add_batch(problem.x_TC, None, batch_index=0)
    quantized_RC, *_, damp, _ = solver.quantize()
    return quantized_RC, damp


def test_our_defaults_are_theirs():
    from gptqmodel.quantization.config import GPTQConfig

    theirs, ours = GPTQConfig(bits=4, offload_to_disk=False), parse_scheme("gptq-4bit")
    assert (ours.group, ours.sym, ours.act_order, ours.act_group_aware, ours.static_groups) == (
        theirs.group_size,
        theirs.sym,
        theirs.desc_act,
        theirs.act_group_aware,
        theirs.static_groups,
    )
    assert ours.damp == pytest.approx(theirs.damp_percent)
    assert ours.damp_increment == pytest.approx(theirs.damp_auto_increment)


GPTQ_CASES = [  # rows, columns, seed, what the spec ends with, and ties
    *((96, 512, bits, f"gptq-{bits}bit:group={group}:{order}", TIES)
      for bits in (3, 4) for group in (128, 32) for order in ORDERS.values()),
    # No ties here, but at 8 bits a step is so small that float32 decides one weight in 10,000.
    *((48, 256, bits, f"gptq-{bits}bit:group=64:sym=false:{order}", 1)
      for bits in (2, 3, 4, 8) for order in ORDERS.values()),
    # One group a row; a last group that is ragged; groups that cross blocks; damping.
    *((96, 512, 0, f"gptq-4bit:group=-1:{ORDERS[order]}", TIES)
      for order in ("natural", "act_order")),
    *((64, 300, 0, f"gptq-4bit:{ORDERS[order]}", TIES)
      for order in ("natural", "group_aware", "act_order")),
    *((64, 384, 0, f"gptq-3bit:group={group}:{ORDERS['natural']}", TIES) for group in (48, 192)),
    *((64, 256, 0, f"gptq-3bit:damp={damp}", TIES) for damp in (0.01, 0.1)),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "columns", "seed", "spec", "ties"), GPTQ_CASES)
def test_gptq_gives_their_weights(rows, columns, seed, spec, ties):
    problem = make_problem(rows, columns, seed=seed)
    ours_RC = problem.solve(spec)
    theirs_RC, _ = solve_peer(problem, spec)
    assert rows_differing(ours_RC, theirs_RC) <= ties
    # Either side of a tie is as good: over all rows the objectives agree to a thousandth.
    assert problem.objective(ours_RC) == pytest.approx(problem.objective(theirs_RC), rel=1e-3)


def test_gptq_raises_the_damping_as_they_do():
    problem = make_problem(64, 256)
    few = Problem(problem.weight_RC, problem.x_TC[:40])  # 40 tokens span 40 of 256 directions
    spec = "gptq-4bit:damp=0.000000001:damp_increment=0.02"
    _, damp = solve_peer(few, spec)
    (note,) = parse_scheme(spec).quantize(few.linears).notes
    assert damp == pytest.approx(0.02, rel=1e-3)
    assert note.endswith("to 0.02 to factorize")


def test_a_dead_column_becomes_zero_in_both():
    problem = make_problem(32, 256)
    problem.x_TC[:, [7, 200]] = 0
    theirs_RC, _ = solve_peer(problem, "gptq-4bit")
    ours_RC = problem.solve("gptq-4bit")
    assert not theirs_RC[:, [7, 200]].any()
    assert not ours_RC[:, [7, 200]].any()


def test_a_group_without_negative_weights_keeps_its_range_here_and_loses_half_of_it_there():
    problem = make_problem(16, 64)
    positive = Problem(problem.weight_RC.abs(), problem.x_TC)
    spec = "gptq-4bit:group=64:act_group_aware=false"
    theirs_RC, _ = solve_peer(positive, spec)
    ours_RC = positive.solve(spec)
    # Their scale is max / 15 with codes up to 7: nothing above 7/15 of the range comes back.
    assert bool((theirs_RC.amax(1) < 0.6 * positive.weight_RC.amax(1)).all())
    assert bool((ours_RC.amax(1) > 0.85 * positive.weight_RC.amax(1)).all())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [128, -1])
def test_rtn_gives_the_weights_of_their_quantizer(bits, symmetric, group):
    from gptqmodel.quantization.quantizer import Quantizer

    problem = make_problem(48, 512)
    ours_RC = problem.solve(f"rtn-{bits}bit:group={group}:sym={symmetric}")
    quantizer = Quantizer(config_of(bits, group, symmetric))
    quantizer.configure(perchannel=True)
    parts = []
    for part_RK in problem.weight_RC.split(512 if group == -1 else group, dim=1):
        quantizer.find_params(part_RK, weight=True)
        parts.append(quantizer.quantize(part_RK))
    # The same operations in the same order: nothing is left to round differently.
    assert torch.equal(ours_RC, torch.cat(parts, dim=1))


@pytest.mark.parametrize("bits", [3, 4])
def test_awq_clips_as_they_do(bits):
    from gptqmodel.looper.awq_processor import AWQProcessor

    problem = make_problem(256, 512)
    x_TC = problem.x_TC[:512]  # it clips on 512 tokens, we on all there are
    config = SimpleNamespace(bits=bits, group_size=128, sym=False)
    processor = SimpleNamespace(qcfg=config)
    processor._pseudo_quantize_tensor_into = partial(
        AWQProcessor._pseudo_quantize_tensor_into, processor
    )
    bound_RG1 = AWQProcessor._compute_best_clip(processor, problem.weight_RC, x_TC)
    weight_RGK = problem.weight_RC.view(256, 4, 128)
    clipped_RC = weight_RGK.clamp(-bound_RG1, bound_RG1).flatten(1)
    theirs_RC = torch.empty_like(clipped_RC)
    processor._pseudo_quantize_tensor_into(clipped_RC, theirs_RC)

    ours_RC = Problem(problem.weight_RC, x_TC).solve(f"awq-{bits}bit")
    equal_RG = torch.isclose(ours_RC, theirs_RC, rtol=1e-4, atol=1e-8).view(256, 4, 128).all(-1)
    # Errors of two clippings may be equal to float32's last digits; then either may be chosen.
    assert float(equal_RG.float().mean()) > 0.99


# ------------------------------------------------------------------------------------- GPTAQ


@pytest.mark.parametrize("order", ["natural", "act_order"])
@pytest.mark.parametrize(("columns", "group"), [(128, 64), (512, 128), (512, -1)])
def test_gptaq_gives_their_weights(columns, group, order):
    from gptqmodel.looper.named_module import NamedModule
    from gptqmodel.looper.native_processor import NATIVE_INPUTS_STATE_KEY
    from gptqmodel.quantization.config import GPTAQConfig
    from gptqmodel.quantization.gptaq import GPTAQ

    problem = make_problem(96, columns, seed=1)
    generator = torch.Generator().manual_seed(5)
    full_TC = problem.x_TC + 0.1 * problem.x_TC.abs().mean(0) * torch.randn(
        problem.x_TC.shape, generator=generator
    )
    spec = f"gptaq-4bit:group={group}:{ORDERS[order]}:scale_dtype=float32"
    scheme = parse_scheme(spec)
    inputs = InputsAccumulator(columns)
    inputs.add(problem.x_TC, full_TC)
    linears = Linears({"linear": problem.weight_RC.clone()}, inputs.result())
    ours_RC = scheme.quantize(linears).weights["linear"]

    module = NamedModule(linear_of(problem), "linear", "model.layers.0.linear", 0)
    module.state[NATIVE_INPUTS_STATE_KEY] = [full_TC[None]]
    config = config_of(
        4, group, True, desc_act=scheme.act_order, damp_percent=scheme.damp,
        gptaq=GPTAQConfig(alpha=scheme.alpha),
    )  # fmt: skip
    solver = GPTAQ(module, config)
    solver.quantizer.configure(perchannel=True)
    solver.add_batch(problem.x_TC[None], None)
    theirs_RC = solver.quantize()[0]
    assert rows_differing(ours_RC, theirs_RC) <= TIES


# ------------------------------------------------------------------------------ whole models


@pytest.mark.parametrize("family", FAMILIES)
def test_the_preset_is_their_whole_model_within_the_noise_of_draws(tmp_path, family):
    folder = save(tmp_path / "model", family)

    def theirs(calibration_BT):
        from gptqmodel import GPTQModel
        from gptqmodel.quantization import GPTQ
        from gptqmodel.quantization.config import GPTQConfig

        weights = {}
        begin, quantize = GPTQ.__init__, GPTQ.quantize

        def name(self, module, *arguments, **options):
            begin(self, module, *arguments, **options)
            self.full_name = module.full_name

        def keep(self, *arguments, **options):
            answer = quantize(self, *arguments, **options)
            weights[self.full_name] = answer[0].detach().float().clone()
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)  # where it writes its logs
            patch.setattr(GPTQ, "__init__", name)
            patch.setattr(GPTQ, "quantize", keep)
            config = GPTQConfig(bits=3, group_size=64, offload_to_disk=False)
            model = GPTQModel.load(str(folder), config, device="cpu", dtype=torch.float32)
            rows = [
                {"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]}
                for row in calibration_BT
            ]
            model.quantize(rows, batch_size=1)
        assert len(weights) == 2 * 7
        return weights

    spec = "gptq-3bit:preset=gptqmodel:group=64:scale_dtype=float32"
    assert_within_noise(folder, spec, theirs)
