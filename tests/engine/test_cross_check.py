"""The cross-check against a stand-in for GPTQModel; the real one is in tests/peers.

The stand-in is a package with the three names the cross-check uses, in front of it the plain
numpy GPTQ of tests/support/reference: another implementation than ours, found by the other process.
"""

import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch

from qaudit.core.gram import InputsAccumulator
from qaudit.core.linears import Linears, Quantized
from qaudit.core.registry import parse_scheme
from qaudit.engine import cross_check
from qaudit.engine.cross_check import CrossCheck, inputs_with_gram
from qaudit.errors import MachineError

STAND_IN = """
import numpy as np
import torch
from tests.support.reference.plain_gptq import gptq
print("a banner that must not reach the standard output")


class GPTQConfig:
    def __init__(self, **options):
        self.__dict__.update(options)


class Quantizer:
    def configure(self, perchannel):
        assert perchannel


class GPTQ:
    def __init__(self, linear, config):
        self.weight, self.config, self.quantizer = linear.weight.detach(), config, Quantizer()

    def add_batch(self, x, y, batch_index):
        self.gram = 2 / len(x) * (x.T @ x)

    def quantize(self):
        config = self.config
        codes, result = gptq(
            self.weight.double().numpy(), self.gram.double().numpy(), bits=config.bits,
            group=config.group_size, symmetric=config.sym, act_order=config.desc_act,
            act_group_aware=config.act_group_aware, static_groups=config.static_groups,
            damp=config.damp_percent,
        )
        group = config.group_size if config.group_size > 0 else result.shape[1]
        steps = np.divide(result, codes - 2 ** (config.bits - 1))
        steps = [np.nanmax(part, 1) for part in np.split(steps, result.shape[1] // group, 1)]
        group_of = torch.arange(result.shape[1]) // group
        weight, scale = torch.from_numpy(result).float(), torch.from_numpy(np.stack(steps, 1))
        return weight, scale, None, group_of, 0.0, 0.0, config.damp_percent, len(self.gram)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    package = tmp_path / "gptqmodel"
    (package / "quantization").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.stand-in'\n")
    (package / "quantization" / "config.py").write_text(textwrap.dedent(STAND_IN))
    (package / "quantization" / "__init__.py").write_text("from .config import GPTQ\n")
    monkeypatch.syspath_prepend(tmp_path)


def group_of_linears(names=("q", "k"), columns=64, tokens=256, dtype=torch.float32, dead=()):
    generator = torch.Generator().manual_seed(0)
    x_TC = torch.randn(tokens, columns, generator=generator)
    x_TC *= torch.exp(torch.randn(columns, generator=generator))
    x_TC[:, list(dead)] = 0
    inputs = InputsAccumulator(columns)
    inputs.add(x_TC)
    weights = {n: 0.02 * torch.randn(16, columns, generator=generator).to(dtype) for n in names}
    return Linears(weights, inputs.result())


def share(note):
    return float(note.partition("agrees on ")[2].partition(" %")[0])


def test_a_missing_library_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(cross_check, "find_spec", lambda name: None)
    with pytest.raises(MachineError) as caught:
        CrossCheck(1)
    assert "gptqmodel" in caught.value.message
    assert "pip install 'qaudit-llm[gptqmodel]'" in caught.value.hint


def test_another_implementation_agrees_and_a_scheme_that_did_not_run_does_not(stand_in, capfd):
    natural = parse_scheme("gptq-4bit:group=32:act_group_aware=false")
    default = parse_scheme("gptq-4bit:group=32")
    one_group = parse_scheme("gptq-3bit:group=-1")
    as_there = parse_scheme("gptq-4bit:group=32:damp=0.06:scale_dtype=float32")
    float32 = "checked with float32 scales, as GPTQModel computes them"
    with CrossCheck(2) as check:  # one linear of each dtype
        for dtype in (torch.float32, torch.bfloat16):
            linears = group_of_linears(("q",), dtype=dtype, dead=[5])
            notes = [
                check.observe(s, linears, s.quantize(linears))
                for s in (natural, default, one_group)
            ]
            rounded = parse_scheme("rtn-4bit:group=32").quantize(linears)
            check_again = check.observe(as_there, linears, rounded)
            # One row of 16 may follow another code from a tie of a symmetric grid on.
            assert all(share(note) > 93 for note in notes), notes
            assert share(check_again) < 85
            assert all(float32 in note for note in notes)
            assert float32 not in check_again
            assert all("GPTQModel 0.stand-in" in note and "`q`" in note for note in notes)
    assert capfd.readouterr().out == ""


def test_only_the_first_linears_of_each_gptq_scheme_are_checked(stand_in, monkeypatch):
    asked = []

    def ask(self, config, weight_RC, x_CC):
        asked.append(config["bits"])
        return cross_check.PeerAnswer("0", weight_RC.numpy(), np.ones((16, 64), np.float32), 0.05)

    monkeypatch.setattr(CrossCheck, "_ask", ask)
    linears = group_of_linears(("q", "k", "v"))
    quantized = Quantized(linears.weights, 0)
    check = CrossCheck(4)
    for scheme in ("rtn-4bit", "gptq-4bit", "gptq-3bit"):
        notes = [check.observe(parse_scheme(scheme), linears, quantized) for _ in range(3)]
        if scheme == "rtn-4bit":
            assert notes == [None, None, None]
        else:
            assert [note and note.count("agrees") for note in notes] == [3, 1, None]
    assert asked == [4] * 4 + [3] * 4


def test_linears_of_experts_are_checked_beside_the_first(stand_in, monkeypatch):
    asked = []

    def ask(self, config, weight_RC, x_CC):
        asked.append(len(weight_RC))
        return cross_check.PeerAnswer("0", weight_RC.numpy(), np.ones((16, 64), np.float32), 0.05)

    monkeypatch.setattr(CrossCheck, "_ask", ask)
    dense, expert = group_of_linears(("q", "k")), group_of_linears(("gate", "up"))
    expert = replace(expert, inputs=replace(expert.inputs, seen=256))
    check, scheme = CrossCheck(1), parse_scheme("gptq-4bit")
    notes = [check.observe(scheme, one, Quantized(one.weights, 0)) for one in (dense, expert) * 2]
    assert [bool(note) for note in notes] == [True, True, False, False]
    assert "`q`" in notes[0] and "`gate`" in notes[1]


@pytest.mark.parametrize("tokens", [256, 20], ids=["full rank", "fewer tokens than columns"])
def test_made_inputs_have_the_gram_matrix_they_were_made_for(tokens):
    gram_CC = group_of_linears(tokens=tokens, dead=[0, 9]).inputs.gram_CC.double()
    x_CC = inputs_with_gram(gram_CC)
    made_CC = x_CC.double().T @ x_CC.double()
    scale = made_CC.diagonal().sum() / gram_CC.diagonal().sum()
    # Both the Gram matrix and x are float32: what is left is a few of their last bits.
    assert (made_CC / scale - gram_CC).abs().max() < 1e-5 * gram_CC.abs().max()
    assert not x_CC[:, [0, 9]].any()
    hessian_C = 2 / 64 * made_CC.diagonal()
    assert float(hessian_C[hessian_C > 0].mean()) == pytest.approx(1, rel=1e-5)


def test_inputs_that_are_all_zero_stay_zero():
    assert not inputs_with_gram(torch.zeros(8, 8, dtype=torch.float64)).any()
