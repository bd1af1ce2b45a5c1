import numpy as np
import pytest
import torch

from qaudit.core.gptq_solver import factor_backwards, factorize
from qaudit.core.linears import Inputs, Linears
from qaudit.core.registry import parse_scheme
from qaudit.errors import SchemeError, SourceError
from tests.support.correlated import ORDERS, correlated_inputs, problem
from tests.support.reference.plain_gptq import gptq

torch.set_num_threads(1)


def solve(spec, linears):
    return parse_scheme(spec).quantize(linears).weights["linear"].double().numpy()


def objective(linears, quantized):
    error = linears.weights["linear"].double().numpy() - quantized
    return float(np.sum((error @ linears.inputs.gram_CC.double().numpy()) * error))


@pytest.mark.parametrize("scale_dtype", ["float32", "bf16"])
@pytest.mark.parametrize("static_groups", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("columns", "group"),
    [(256, 128), (320, 128), (300, 64), (200, 48), (330, 192), (96, 128), (200, -1)],
    ids=["even", "ragged", "small", "unaligned", "wide", "larger-than-row", "channel"],
)
def test_codes_equal_the_published_loop_in_double_precision(
    columns, group, symmetric, order, static_groups, scale_dtype
):
    linears = problem(24, columns, seed=columns + group)
    options = {**ORDERS[order], "static_groups": static_groups, "scale_dtype": scale_dtype}
    spec = ":".join(
        [f"gptq-3bit:group={group}:sym={symmetric}", *(f"{k}={v}" for k, v in options.items())]
    )
    codes, expected = gptq(
        linears.weights["linear"].numpy(),
        linears.inputs.gram_CC.numpy(),
        bits=3,
        group=group,
        symmetric=symmetric,
        **options,
    )
    quantized = parse_scheme(spec).quantize(linears)
    # What is left is the rounding of scales that come from two ways to the same compensated
    # weights; scales in bfloat16 have lost it.
    off = np.abs(quantized.weights["linear"].numpy() - expected).max()
    assert off < 1e-12 if scale_dtype == "float32" else off == 0
    np.testing.assert_array_equal(quantized.stored["linear"].codes_RC.numpy(), codes)


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


def test_output_error_is_well_below_that_of_rounding_to_nearest():
    linears = problem(32, 384, seed=3)
    ratio = objective(linears, solve("gptq-3bit:sym=false", linears)) / objective(
        linears, solve("rtn-3bit:sym=false", linears)
    )
    assert ratio < 0.8


def test_rows_of_several_linears_are_solved_as_if_alone():
    joined = problem(40, 256, seed=5)
    weight = joined.weights["linear"]
    split = Linears({"q": weight[:24], "k": weight[24:]}, joined.inputs)
    quantized = parse_scheme("gptq-4bit").quantize(split)
    together = parse_scheme("gptq-4bit").quantize(joined)
    assert torch.equal(torch.cat(list(quantized.weights.values())), together.weights["linear"])
    assert quantized.bits == together.bits


def test_dead_columns_need_no_damping():
    gram_CC = torch.diag(torch.tensor([2.0, 0.0, 3.0]))
    hessian = factorize(gram_CC, torch.arange(3), "`up`", damp=0.0, damp_increment=0.01)
    assert hessian.notes == ("1 columns never see an input",)


def test_dead_columns_become_zero_and_are_noted():
    linears = problem(8, 128, seed=2, dead=(3, 77))
    quantized = parse_scheme("gptq-4bit:scale_dtype=float32").quantize(linears)
    assert not quantized.weights["linear"][:, [3, 77]].any()
    assert quantized.weights["linear"][:, 4].any()
    assert "2 columns never see an input" in quantized.notes
    _, expected = gptq(
        linears.weights["linear"].numpy(),
        linears.inputs.gram_CC.numpy(),
        bits=4,
        group=128,
        act_group_aware=True,
    )
    assert np.abs(quantized.weights["linear"].numpy() - expected).max() < 1e-12


def test_inputs_that_are_all_zero_leave_zero_weights_and_no_crash():
    linears = problem(4, 32, dead=range(32))
    quantized = parse_scheme("gptq-4bit").quantize(linears)
    assert not quantized.weights["linear"].any()


def test_the_unit_of_the_inputs_does_not_matter():
    linears = problem(16, 160, seed=9, dead=(5,))
    scaled = Linears(
        linears.weights,
        Inputs(linears.inputs.gram_CC * 2.0**40, linears.inputs.absmean_C, linears.inputs.tokens),
    )
    assert np.array_equal(solve("gptq-4bit", linears), solve("gptq-4bit", scaled))


def indefinite(columns=16, smallest=-0.085):
    """A matrix with unit diagonal whose least eigenvalue is known and negative."""
    rotation, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((columns, columns)))
    eigenvalues = np.linspace(smallest, 2 - smallest, columns)
    matrix = torch.from_numpy(rotation * eigenvalues @ rotation.T)
    return Linears(
        {"linear": torch.randn(4, columns, generator=torch.Generator().manual_seed(0)).double()},
        Inputs(matrix, torch.ones(columns).double(), 10),
    )


def test_a_row_whose_range_overflows_shows_in_its_weights_and_in_no_other_row():
    linears = problem(4, 32, dtype=torch.float32)
    linears.weights["linear"][2, 5] = 3e38  # finite, but twice as much is not
    weight = parse_scheme("gptq-4bit").quantize(linears).weights["linear"]
    assert weight[2].isnan().all()
    assert weight[[0, 1, 3]].isfinite().all()


def test_a_failed_factorization_raises_the_damping_and_says_so():
    linears = indefinite()
    mean = float(linears.inputs.gram_CC.diagonal().mean())
    needed = next(d / 100 for d in range(5, 100) if d / 100 * mean > 0.085)
    notes = parse_scheme("gptq-4bit").quantize(linears).notes
    assert f"damping raised from 0.05 to {needed:.4g} to factorize" in notes


def test_a_hessian_that_never_factorizes_is_an_error_with_the_linear_named():
    with pytest.raises(SourceError, match="`linear` cannot be factorized"):
        parse_scheme("gptq-4bit:damp_increment=0").quantize(indefinite())
    with pytest.raises(SourceError, match="`linear` cannot be factorized"):
        parse_scheme("gptq-4bit").quantize(indefinite(smallest=-3.0))


def test_two_orders_at_once_are_refused():
    with pytest.raises(SchemeError, match="two orders"):
        parse_scheme("gptq-4bit:act_order=true")


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


@pytest.mark.parametrize("columns", [1, 5, 128, 129, 300])
def test_the_backward_factor_rebuilds_the_matrix(columns):
    x = torch.from_numpy(correlated_inputs(columns, tokens=2 * columns + 10, seed=columns))
    matrix = x.T @ x
    lower, diagonal = factor_backwards(matrix.clone())
    lower = torch.tril(lower)
    assert torch.equal(lower.diagonal(), torch.ones(columns, dtype=torch.float64))
    inverse = torch.linalg.inv(lower.T)
    middle = inverse @ matrix @ inverse.T
    rest = middle - torch.diag(middle.diagonal())
    # D is diagonal up to double rounding of a matrix whose entries spread over decades.
    assert float(rest.abs().max()) < 1e-9 * float(middle.abs().max())
    assert torch.allclose(diagonal, middle.diagonal(), rtol=1e-7)


def test_the_backward_factor_of_an_indefinite_matrix_is_none():
    assert factor_backwards(torch.diag(torch.tensor([1.0, -1.0, 1.0]))) is None
