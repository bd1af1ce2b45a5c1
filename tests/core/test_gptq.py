"""GPTQ, GPTAQ and Qronos in double precision against their definitions, and loops over columns."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from qaudit.core import column_loops
from qaudit.core.column_loops import FUSED, LOOPS, PLAIN, choose
from qaudit.core.gptq_solver import factorize, quantize_block
from qaudit.core.linears import Inputs, Linears
from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Calibration
from qaudit.errors import SchemeError, SourceError
from qaudit.planning.machine import choose_column_loop
from qaudit.planning.sizes import Sizes
from tests.support.pretended_device import pretended
from tests.support.problems import ORDERS, correlated_inputs, problem
from tests.support.reference.plain_gptq import gptq, qronos
from tests.support.schemes import example


def solve(spec, linears):
    return parse_scheme(spec).quantize(linears).weights["linear"].double().numpy()


def objective(linears, quantized):
    error = linears.weights["linear"].double().numpy() - quantized
    return float(np.sum((error @ linears.inputs.gram_CC.double().numpy()) * error))


def holds_the_loop(name, linears, off, *, spelled, **options):
    """Hold codes and weights against the published loop with the same options."""
    scheme = parse_scheme(":".join([name, *(f"{key}={value}" for key, value in spelled.items())]))
    weight_RC, gram_CC = linears.weights["linear"].numpy(), linears.inputs.gram_CC.numpy()
    codes, expected = gptq(weight_RC, gram_CC, bits=scheme.bits, **options)
    quantized = scheme.quantize(linears)
    assert np.abs(quantized.weights["linear"].numpy() - expected).max() <= off
    np.testing.assert_array_equal(quantized.stored["linear"].codes_RC.numpy(), codes)
    return quantized


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("symmetric", "static_groups", "scale_dtype"),  # each two of them in every way
    [
        (True, False, "bf16"),
        (False, True, "bf16"),
        (True, True, "float32"),
        (False, False, "float32"),
    ],
)
@pytest.mark.parametrize(
    ("columns", "group"),
    [(256, 128), (320, 128), (300, 64), (200, 48), (330, 192), (96, 128), (200, -1)],
    ids=["even", "ragged", "small", "unaligned", "wide", "larger-than-row", "channel"],
)
def test_codes_are_those_of_the_loop(columns, group, symmetric, order, static_groups, scale_dtype):
    options = {**ORDERS[order], "group": group, "static_groups": static_groups}
    options |= {"scale_dtype": scale_dtype}
    # What is left is the rounding of scales that come from two ways to the same compensated
    # weights; scales in bfloat16 have lost it.
    off = 1e-12 if scale_dtype == "float32" else 0
    linears, spelled = problem(24, columns, seed=columns + group), {**options, "sym": symmetric}
    holds_the_loop("gptq-3bit", linears, off, spelled=spelled, symmetric=symmetric, **options)


TOOLS = {  # AutoGPTQ takes scales on the way, llm-compressor from the original weights
    "autogptq": {"act_order": True, "damp": 0.01},
    "llm-compressor": {"act_order": True, "static_groups": True, "damp": 0.01},
    "gptqmodel": {"act_group_aware": True, "damp": 0.05},
    "paper-a": {"act_order": True, "damp": 0.05},
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("bits", "columns", "group"), [(4, 256, 128), (3, 300, 64)])
def test_a_preset_is_the_loop_of_its_tool(tool, bits, columns, group):
    spelled = {"preset": tool, "group": group, "scale_dtype": "float32"}
    linears = problem(16, columns, seed=columns)
    holds_the_loop(f"gptq-{bits}bit", linears, 1e-12, spelled=spelled, group=group, **TOOLS[tool])
    at_once = parse_scheme(f"gptq-4bit:preset={tool}").calibration is Calibration.OWN_BLOCKS
    assert at_once == (tool == "llm-compressor")


@pytest.mark.parametrize("bits", [4, 3])
def test_single_precision_flips_few_codes_and_reaches_the_same_objective(bits):
    exact = problem(48, 640, seed=7)
    rough = Linears(
        {"linear": exact.weights["linear"].float()},
        Inputs(exact.inputs.gram_CC.float(), exact.inputs.absmean_C.float(), exact.inputs.tokens),
    )
    wanted = solve(f"gptq-{bits}bit", exact)
    found = solve(f"gptq-{bits}bit", rough)
    # float32 carries about 1e-7 of a target that is rounded to steps of 1e-1 of its range. A
    # target that close to a tie flips, which is about one in 1e5, and each flip reshuffles what
    # is left of its row: so a few of 48 rows may differ, each by at most all its columns.
    rows_changed = np.mean(np.abs(wanted - found).max(1) > 1e-3)
    assert rows_changed < 0.25
    assert objective(exact, found) == pytest.approx(objective(exact, wanted), rel=0.01)


def test_rows_of_several_linears_are_solved_as_if_alone_and_one_that_overflows_shows_alone():
    joined = problem(40, 256, seed=5)
    weight = joined.weights["linear"]
    split = Linears({"q": weight[:24], "k": weight[24:]}, joined.inputs)
    quantized = parse_scheme("gptq-4bit").quantize(split)
    together = parse_scheme("gptq-4bit").quantize(joined)
    assert torch.equal(torch.cat(list(quantized.weights.values())), together.weights["linear"])
    assert quantized.bits == together.bits
    linears = problem(4, 32, dtype=torch.float32)
    linears.weights["linear"][2, 5] = 3e38  # finite, but twice as much is not
    weight = parse_scheme("gptq-4bit").quantize(linears).weights["linear"]
    assert weight[2].isnan().all()
    assert weight[[0, 1, 3]].isfinite().all()


def test_dead_columns_become_zero_without_damping_and_are_noted():
    gram_CC = torch.diag(torch.tensor([2.0, 0.0, 3.0]))
    hessian = factorize(gram_CC, torch.arange(3), "`up`", damp=0.0, damp_increment=0.01)
    assert hessian.notes == ("1 columns never see an input",)
    linears = problem(8, 128, seed=2, dead=(3, 77))
    spelled = {"scale_dtype": "float32"}
    options = {"group": 128, "act_group_aware": True}
    quantized = holds_the_loop("gptq-4bit", linears, 1e-12, spelled=spelled, **options)
    assert not quantized.weights["linear"][:, [3, 77]].any()
    assert quantized.weights["linear"][:, 4].any()
    assert "2 columns never see an input" in quantized.notes
    nothing = parse_scheme("gptq-4bit").quantize(problem(4, 32, dead=range(32)))
    assert not nothing.weights["linear"].any()


def indefinite(columns=16, smallest=-0.085):
    """A matrix with unit diagonal whose least eigenvalue is known and negative."""
    rotation, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((columns, columns)))
    eigenvalues = np.linspace(smallest, 2 - smallest, columns)
    matrix = torch.from_numpy(rotation * eigenvalues @ rotation.T)
    return Linears(
        {"linear": torch.randn(4, columns, generator=torch.Generator().manual_seed(0)).double()},
        Inputs(matrix, torch.ones(columns).double(), 10),
    )


def test_a_failed_factorization_raises_the_damping_or_is_an_error_with_the_linear_named():
    linears = indefinite()
    mean = float(linears.inputs.gram_CC.diagonal().mean())
    needed = next(d / 100 for d in range(5, 100) if d / 100 * mean > 0.085)
    notes = parse_scheme("gptq-4bit").quantize(linears).notes
    assert f"damping raised from 0.05 to {needed:.4g} to factorize" in notes
    far = indefinite(smallest=-3.0)
    for spec, never in (("gptq-4bit:damp_increment=0", linears), ("gptq-4bit", far)):
        with pytest.raises(SourceError, match="`linear` cannot be factorized"):
            parse_scheme(spec).quantize(never)


def test_the_index_of_groups_is_counted_only_where_it_must_be_stored():
    linears = problem(8, 256)

    def bits(options):
        return parse_scheme(f"gptq-4bit{options}").quantize(linears).bits

    natural = 8 * (256 * 4 + 2 * 16)
    order = ":act_order=true:act_group_aware=false"
    assert bits("") == bits(order + ":static_groups=true") == natural
    assert bits(order + ":group=-1") == 8 * (256 * 4 + 16)
    assert bits(order) == natural + 256 * 32
    assert bits(":sym=false") == natural + 8 * 2 * 4


# --------------------------------------------------------------------------------------------------
# GPTAQ and Qronos, over two streams that differ.


def streams(rows, columns, seed=0, dead=()):
    """Return linears with a drift, and the inputs of both streams."""
    linears = problem(rows, columns, seed=seed, dead=dead)
    own = correlated_inputs(columns, seed=seed)
    own[:, list(dead)] = 0.0
    generator = np.random.default_rng(seed + 2)
    mix = np.eye(columns) + 0.1 * generator.standard_normal((columns, columns)) / columns**0.5
    full = own @ mix + 0.05 * generator.standard_normal(own.shape)
    drift = torch.from_numpy((full - own).T @ own)
    inputs = replace(linears.inputs, drift_CC=drift)
    return replace(linears, inputs=inputs), own, full


def distance(linears, own, full, quantized):
    """Squared distance of the output to that of the unquantized linear in its own model."""
    weight = linears.weights["linear"].numpy()
    return float(np.square(own @ quantized.T - full @ weight.T).sum())


@pytest.mark.parametrize("static_groups", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("columns", "group"), [(256, 128), (300, 64), (200, -1)])
@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_gptaq_codes_equal_the_published_loop(columns, group, order, static_groups, alpha):
    linears, _, _ = streams(16, columns, seed=columns)
    options = {**ORDERS[order], "group": group, "static_groups": static_groups, "alpha": alpha}
    spelled, drift_CC = {**options, "scale_dtype": "float32"}, linears.inputs.drift_CC.numpy()
    # Two ways to the same sums in float64, from which scales are taken.
    holds_the_loop("gptaq-3bit", linears, 1e-11, spelled=spelled, drift_CC=drift_CC, **options)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    ("columns", "group", "dead"), [(96, 32, ()), (150, -1, ()), (96, 32, (5,))]
)
@pytest.mark.parametrize("damp", [1e-6, 1e-3])
def test_qronos_equals_least_squares_around_every_column(columns, group, dead, act_order, damp):
    linears, own, full = streams(8, columns, seed=columns, dead=dead)
    options = {"group": group, "act_order": act_order, "damp": damp}
    weight_RC = linears.weights["linear"].numpy()
    expected = qronos(weight_RC, own, full, bits=3, symmetric=False, **options)
    spec = (
        f"qronos-3bit:group={group}:sym=false:static_groups=true:damp={damp}"
        f":act_group_aware=false:act_order={act_order}:scale_dtype=float32"
    )
    result = solve(spec, linears)
    # Thirty steps of power iteration come within 1e-3 of the largest eigenvalue, of which the
    # damping is a part: that turns a code over only where a target is that near to a tie.
    assert np.mean(np.isclose(result, expected, rtol=0, atol=1e-10).all(1)) > 0.7
    reached = distance(linears, own, full, result)
    assert reached == pytest.approx(distance(linears, own, full, expected), rel=0.02)


@pytest.mark.parametrize("name", ["gptaq", "qronos"])
def test_without_drift_they_are_gptq(name):
    linears = problem(16, 160, seed=9)
    none = parse_scheme(f"{name}-4bit:damp=0.05").quantize(linears)
    zero = replace(linears.inputs, drift_CC=torch.zeros(160, 160).double())
    still = parse_scheme(f"{name}-4bit:damp=0.05").quantize(replace(linears, inputs=zero))
    assert torch.equal(none.weights["linear"], still.weights["linear"])
    if name == "gptaq":
        plain = parse_scheme("gptq-4bit").quantize(linears)
        assert torch.equal(none.weights["linear"], plain.weights["linear"])


def test_what_reads_both_streams_says_so_and_bad_settings_are_refused():
    for name in ("gptaq", "qronos"):
        assert parse_scheme(f"{name}-4bit").calibration is Calibration.BOTH_STREAMS
        with pytest.raises(SchemeError, match="behind those quantized before"):
            parse_scheme(f"{name}-4bit:true_sequential=false")
    for name in ("gptq", "gptaq", "qronos"):
        with pytest.raises(SchemeError, match="two orders"):
            parse_scheme(f"{name}-4bit:act_order=true")


@pytest.mark.parametrize("name", ["gptq", "gptaq", "qronos"])
def test_the_unit_of_the_inputs_does_not_matter(name):
    linears, _, _ = streams(16, 160, seed=9, dead=(5,))
    moments = {key: getattr(linears.inputs, key) * 2.0**40 for key in ("gram_CC", "drift_CC")}
    scaled = replace(linears, inputs=replace(linears.inputs, **moments))
    assert np.array_equal(solve(f"{name}-4bit", linears), solve(f"{name}-4bit", scaled))


def test_few_tokens_raise_the_damping_of_qronos_and_say_so():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 64, generator=generator)
    inputs = Inputs(x.T @ x, x.abs().mean(0), 20, drift_CC=0.01 * x.T @ x)
    weight = torch.randn(4, 64, generator=generator)
    linears = Linears({"linear": weight}, inputs)
    quantized = parse_scheme("qronos-4bit:damp=0.0000000001").quantize(linears)
    assert any("damping raised" in note for note in quantized.notes)
    assert bool(quantized.weights["linear"].isfinite().all())


# ------------------------------------------------------------------------------ loops over columns


CPU = torch.device("cpu")


def wrong_at_one_weight(weight_BR, target_BR, *others):
    quantize_block(weight_BR, target_BR, *others)
    target_BR[-1, 3] += others[1].scale[0, 3]


def without_the_pull(weight_BR, target_BR, lower_BB, grid_PR, grid_of_B, pull=None):
    quantize_block(weight_BR, target_BR, lower_BB, grid_PR, grid_of_B)
    if pull is not None:
        pull.target_BR.copy_(target_BR)


@pytest.mark.parametrize(
    ("function", "loop", "why"),
    [
        (quantize_block, FUSED, "GPTQ's columns are rounded by the fused kernel: the plain loop's"),
        (wrong_at_one_weight, PLAIN, "other codes in columns 0 to 64 of 64"),
        (without_the_pull, PLAIN, "other codes in columns 0 to 64 of 64"),
        (mock.Mock(side_effect=RuntimeError("no image\nfor it")), PLAIN, "no image for it"),
    ],
)
def test_a_gpu_takes_what_gives_the_plain_loops_codes_and_else_the_plain_loop(function, loop, why):
    loops, able = {FUSED: function}, lambda weight: None
    with mock.patch.multiple(column_loops, obstacle=able, LOOPS=loops):
        chosen, note = choose([64, 130], CPU)
    assert chosen == loop
    assert why in note


def test_a_tie_may_go_either_way():
    def other_at_ties(weight_BR, target_BR, lower_BB, grid_PR, grid_of_B, pull=None):
        nudged = (1 + 1e-7) * target_BR
        quantize_block(weight_BR, nudged, lower_BB, grid_PR, grid_of_B, pull)
        target_BR.copy_(nudged)

    assert column_loops._difference(other_at_ties, [128], CPU) is None


def test_the_plan_chooses_for_schemes_that_round_columns_on_a_gpu_alone():
    sizes = Sizes(1, 1, 1, 1, hidden=64, widest=130, vocabulary=9)
    gptq, awq = (parse_scheme(name) for name in ("gptq-4bit", "awq-4bit"))
    assert choose_column_loop("cpu", [gptq], sizes) == (PLAIN, "")
    assert choose_column_loop("cuda", [awq], sizes) == (PLAIN, "")
    assert "without a GPU" in choose_column_loop("cuda", [gptq], sizes)[1]
    with pretended():
        loop, note = choose_column_loop("cuda", [gptq], sizes)
    assert (loop, "not by the fused kernel" in note) == (PLAIN, True)  # no Triton here


@pytest.mark.parametrize("name", ["gptq-4bit", "gptaq-4bit", "quarot-4bit", "atom-4bit:keep=8"])
def test_linears_name_the_loop_that_rounds_them(name):
    linears, counted = example(), mock.Mock(wraps=quantize_block)
    with mock.patch("qaudit.core.schemes.gptq.LOOPS", {**LOOPS, FUSED: counted}):
        expected = parse_scheme(name).quantize(linears)
        assert not counted.called
        quantized = parse_scheme(name).quantize(replace(linears, column_loop=FUSED))
    assert counted.called
    for linear, weight in expected.weights.items():
        assert torch.equal(quantized.weights[linear], weight)


def test_without_triton_the_plain_loop_runs_and_a_note_says_so(monkeypatch):
    monkeypatch.setattr("qaudit.core.column_loops.find_spec", lambda name: None)
    plain, fused = (parse_scheme(f"gptq-4bit{more}") for more in ("", ":fused=true"))
    assert fused.spec != plain.spec  # results of its own
    expected, found = plain.quantize(example()), fused.quantize(example())
    said = "rounded by the plain loop, not the fused kernel: triton is not installed"
    assert set(found.notes) - set(expected.notes) == {said}
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight)


def test_double_precision_and_weights_on_the_cpu_are_left_to_the_plain_loop(monkeypatch):
    monkeypatch.setattr("qaudit.core.column_loops.find_spec", lambda name: name)
    monkeypatch.setattr("qaudit.core.column_loops._is_interpreted", lambda: True)
    assert column_loops.obstacle(torch.zeros(2)) is None
    assert "float64" in column_loops.obstacle(torch.zeros(2, dtype=torch.float64))
    monkeypatch.setattr("qaudit.core.column_loops._is_interpreted", lambda: False)
    assert column_loops.obstacle(torch.zeros(2)) == "there is no CUDA device"
