"""A pass over a model whose last two blocks read keys and values of the first two (Gemma 4)."""

from collections import UserDict
from dataclasses import replace

import numpy as np
import pytest
import torch

from qaudit.core.linears import Quantized
from qaudit.core.registry import parse_scheme, parse_schemes
from qaudit.diagnostics.sensitivity import Variant
from qaudit.diagnostics.sensitivity_measure import run_partly
from qaudit.engine import streams
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.streams import Surroundings
from qaudit.engine.tokens import Tokens
from qaudit.model.blocks import Block, Group
from qaudit.model.links import GIVEN, Arguments
from qaudit.types import FULL_PRECISION
from tests.support import released, tiny, whole
from tests.support.filled import filled
from tests.support.passes import (
    CPU,
    feed,
    losses,
    opened,
    plain_losses,
    plain_model,
    run,
    spec_of,
    windows,
)
from tests.support.pretended_device import pretended

FEW = "rtn-3bit:group=32,gptaq-3bit:group=32"
SCHEMES = f"{FEW},gptq-3bit:group=32,awq-3bit:group=32"


@pytest.fixture
def folder(once):
    return once(tiny.make, "gemma4_text")


def passed(spill, folder):
    return run(folder, SCHEMES, spill)[0]


@pytest.fixture
def in_memory(folder, once):
    return once(passed, folder)


def must_be_equal(read, expected):
    for name, values in filled(read.items()):
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


def test_losses_are_the_whole_models_however_it_spills(folder, in_memory, tmp_path, monkeypatch):
    np.testing.assert_allclose(
        in_memory[FULL_PRECISION], plain_losses(plain_model(folder)), rtol=1e-5
    )
    must_be_equal(run(folder, SCHEMES, tmp_path, limit=0)[0], in_memory)
    monkeypatch.setattr(Tokens, "may_wait_inside", lambda *_: False)
    monkeypatch.setattr(streams, "groups_in_passing", None)
    must_be_equal(run(folder, SCHEMES, tmp_path, limit=60_000)[0], in_memory)
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_holds_a_part_has_the_numbers_of_the_cpu(folder, in_memory, tmp_path):
    with pretended():
        model = opened(folder, device="cuda")
        must_be_equal(run(model, FEW, tmp_path, 60_000, device_limit=60_000)[0], in_memory)


def test_items_read_the_keys_of_their_own_tokens_rounded_where_they_are_made(folder, tmp_path):
    items = [replace(window, scored_from=1) for window in windows(7, 1)]
    given = replace(feed(), items=(items,))
    by_name, tallies = run(folder, "rtn-8bit:kv=int4", tmp_path, given=given)
    for name, tally in filled(tallies.items()):
        np.testing.assert_allclose(tally.options[0], by_name[name], rtol=1e-5)
    plain, rounded = by_name.values()
    assert 1e-6 < np.abs(rounded / plain - 1).max() < 0.1


def test_a_perturbed_pass_hardly_differs_and_variants_share_tokens(folder, in_memory, tmp_path):
    moved = run(folder, "rtn-3bit:group=32", tmp_path, given=replace(feed(), perturbed=True))[0]
    for name in (FULL_PRECISION, spec_of("rtn-3bit:group=32")):
        np.testing.assert_allclose(moved[name], in_memory[name], rtol=1e-4)
        assert not np.array_equal(moved[name], in_memory[name])
    (scheme,) = parse_schemes(["gptq-3bit"])
    untouched, given, model = Variant("role", "none", ()), feed(), opened(folder)
    with HiddenStates(tmp_path, 0, CPU) as states:
        tallies, _ = run_partly(model, given, scheme, [untouched], states, lambda *_: None)
    found = losses(given, tallies[untouched])
    np.testing.assert_allclose(found, in_memory[FULL_PRECISION], rtol=1e-5)


def test_what_a_block_was_given_is_dropped_behind_it(folder, tmp_path):
    items = [replace(window, scored_from=1) for window in windows(2, 1)]
    fed = replace(feed(), items=(items,), reference=lambda _: opened(folder))
    schemes = parse_schemes(["gptq-3bit"])
    with HiddenStates(tmp_path, 10**9, CPU) as states:

        def first_of(stream):
            """Return the first block of which something is kept that was given to it."""
            names = (name.partition("\0") for name, *_ in states.listed())
            given = (name for of, _, name in names if of == f"given/{stream}")
            blocks = (int(name.removeprefix(GIVEN).partition(".")[0]) for name in given)
            return min(blocks, default=4)

        def drops(*streams):
            def progress(block, total, what):
                if block:  # a reference is embedded when its first block comes
                    assert [first_of(stream) for stream in streams] == [block] * len(streams)

            return progress

        embedded = ("calibration/embedded", "evaluation/embedded", "items/embedded")
        progress = drops(*embedded, "evaluation/reference/first")
        run_blocks(opened(folder), fed, schemes, states, progress)
        progress = drops("calibration/embedded", "evaluation/embedded")
        untouched = Variant("role", "none", ())
        run_partly(opened(folder), fed, schemes[0], [untouched], states, progress)


@pytest.mark.parametrize("family", ["deepseek_v4", "glm_moe_dsa"])
def test_an_indexer_that_has_no_gradient_is_left_where_it_starts(family, once, tmp_path):
    folder = once(released.save, family)
    full, learned = run(folder, "flatquant-4bit:steps=3", tmp_path)[0].values()
    assert 1e-6 < np.abs(learned / full - 1).max() < 0.1


# ---------------------------------------------------------------- modules around groups


class Attention(torch.nn.Module):
    """Reads what an earlier block left."""

    def __init__(self):
        super().__init__()
        self.q, self.k = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, hidden_BTD, earlier):
        if isinstance(earlier, UserDict):
            earlier = sum(earlier.values(), torch.zeros(1))
        return self.q(hidden_BTD) + self.k(hidden_BTD) + earlier


ZERO = torch.zeros(1)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (ZERO, ZERO.clone(), True),
        (ZERO, ZERO + 1, False),
        (UserDict(), UserDict(), True),
        (UserDict(keys=ZERO), UserDict(keys=ZERO), False),
    ],
    ids=["equal tensors", "other tensors", "empty stores", "stores"],
)
def test_a_module_that_reads_what_was_left_for_a_batch_is_not_run_on_another(first, second, same):
    module = torch.nn.ModuleDict({"attention": Attention()})
    group = Group("attention.q+attention.k", ("attention.q", "attention.k"))
    block = Block(0, module, (group,), (), lambda _: Arguments())
    around = Surroundings(block)
    with around.watched():
        for earlier in (first, second):
            module["attention"](torch.zeros(1, 2, 4), earlier)
    assert (around.of(group, lambda: ()) is not None) == same


@pytest.mark.parametrize("family", whole.FAMILIES)
def test_errors_are_those_of_attention_and_mlp_in_the_whole_model(once, family, monkeypatch):
    folder, text, errors = once(whole.save, family), whole.tokens(1)[:4], {}

    def quantize(scheme, linears):
        if linears.around is not None:
            halved = {name: weight_RC / 2 for name, weight_RC in linears.weights.items()}
            first = next(iter(linears.weights)).rpartition(".")[0]
            same, half = linears.around([lambda: linears.weights, lambda: halved])
            assert same == 0
            errors[linears.block, first] = half
        # What is installed must not show in what later groups are compared by.
        return Quantized({name: 0 * weight_RC for name, weight_RC in linears.weights.items()}, 0)

    spec = "awq-4bit:preset=autoawq:group=64"
    monkeypatch.setattr(type(parse_scheme(spec)), "quantize", quantize)
    whole.groups_here(folder, spec, text)

    model, expected = plain_model(folder), {}
    halved = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            for name, linears in halved.items():
                outputs = []
                module = layer.get_submodule(name)
                handle = module.register_forward_hook(
                    lambda _, given, out, outputs=outputs: outputs.append(
                        out[0] if isinstance(out, tuple) else out
                    )
                )
                for factor in (1.0, 0.5, 2.0):
                    for linear in linears:
                        module.get_submodule(linear).weight.mul_(factor)
                    if factor != 2:
                        model(text)
                handle.remove()
                expected[index, name] = float((outputs[0] - outputs[1]).square().sum())
    assert errors.keys() == expected.keys()
    # Float32 sums in batches of another shape.
    np.testing.assert_allclose(
        [errors[key] for key in expected], list(expected.values()), rtol=1e-4
    )
