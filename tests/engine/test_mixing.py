"""The choice of bits for a mixture, against a slow one on the whole model."""

from collections import defaultdict
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from qaudit.core.linears import Linears
from qaudit.core.mixture import cheapest
from qaudit.core.registry import parse_scheme
from qaudit.engine.batches import make_batches
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.mixing import scores_of, split, table_of, tied
from qaudit.errors import SchemeError
from tests.support import tiny
from tests.support.passes import CALIBRATION, CPU, opened

CONTEXT = 48


def fed(tables=None):
    batches = make_batches(CALIBRATION, CONTEXT, 160)
    return SimpleNamespace(calibration=batches, column_loop="plain", tables=tables or {})


def slow_nats(folder, scheme):
    """Return what a change of each linear adds, from whole windows, one token after another."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    linears = {n: m for n, m in model.model.layers.named_modules() if isinstance(m, nn.Linear)}
    seen = {}
    for name, module in linears.items():
        module.register_forward_hook(
            lambda _, given, out, name=name: seen.update({name: (given[0], out)})
        )
    moments, fishers, tokens = defaultdict(float), defaultdict(float), 0
    for batch in split(fed().calibration)[1]:
        for row, length in zip(batch.tokens_BT, batch.lengths, strict=True):
            logits = model(row[None, :length].long(), use_cache=False).logits[0]
            loss = nn.functional.cross_entropy(logits, logits.argmax(-1), reduction="sum")
            gradients = torch.autograd.grad(loss, [out for _, out in seen.values()])
            for (name, (given, _)), gradient in zip(seen.items(), gradients, strict=True):
                x = given.detach()
                for token in range(length):
                    moments[name] = moments[name] + x[0, token].outer(x[0, token])
                    fishers[name] = fishers[name] + gradient[0, token] ** 2
            tokens += length
    nats = {}
    for name, module in linears.items():
        weight = module.weight.data.float()
        for bits in scheme.widths:
            rounded = scheme.member(bits).quantize(Linears({"w": weight})).weights["w"]
            change = (rounded - weight).double()
            each = torch.stack([row @ (moments[name] / tokens) @ row for row in change])
            nats[name, bits] = float((each * fishers[name] / tokens).sum() / 2)
    return nats


def test_scores_are_those_of_a_slow_computation_on_the_whole_model(once, tmp_path, monkeypatch):
    folder = once(tiny.make, "llama")
    scheme = parse_scheme("rtn-mix:budget=4:group=32:tie=none:members=248")
    # The likeliest label in place of a draw, as the slow way takes it.
    monkeypatch.setattr(torch, "multinomial", lambda chances, *_, **__: chances.argmax(-1)[:, None])
    with HiddenStates(tmp_path / "spill", 10**9, CPU) as states, torch.no_grad():
        scores = scores_of(scheme, scheme.widths, opened(folder), fed(), states, lambda *_: None)
    made, named = tied(scores, scheme)
    wanted = slow_nats(folder, scheme)
    assert len(made) == len(named) == 3 * 7
    for (block, name), option in made.items():
        for bits, (_, nats) in option.items():
            assert nats == pytest.approx(wanted[f"{block}.{name}", bits], rel=2e-3)


def test_linears_are_quantized_on_other_windows_than_they_are_scored_on():
    fitted, scored = split(fed().calibration)
    of_fitted, of_scored = ({w for b in part for w in b.windows} for part in (fitted, scored))
    assert of_fitted and of_scored
    assert not of_fitted & of_scored
    assert of_fitted | of_scored == set(range(len(CALIBRATION)))
    (batch, *_) = fed().calibration
    fitted, scored = split([batch.of_rows(slice(0, 1))])  # one window is both
    assert [b.windows for b in fitted] == [b.windows for b in scored]


def test_the_choice_is_within_one_step_of_the_best_of_all():
    draw = np.random.default_rng(0)
    choices = {
        (k, "w"): {b: (100 * b, float(draw.random() * 4.0**-b)) for b in (2, 3, 4)}
        for k in range(7)
    }
    for limit in (1400, 1900, 2100, 2350, 2800):
        chosen = cheapest(choices, limit)
        nats = sum(choices[e][b][1] for e, b in chosen.items())
        best = min(
            sum(o[b][1] for o, b in zip(choices.values(), some, strict=True))
            for some in product((2, 3, 4), repeat=7)
            if 100 * sum(some) <= limit
        )
        step = max(o[2][1] - o[3][1] for o in choices.values())
        assert sum(choices[e][b][0] for e, b in chosen.items()) <= limit
        assert best <= nats <= best + step


@pytest.mark.parametrize(
    ("family", "rows", "tie"),
    [
        ("llama", 7, "fused"),
        ("qwen2_moe", 4 + 3 + 3, "fused"),
        ("qwen2_moe", 4 + 4 * 3 + 3, "none"),
        ("gemma3n_text", None, "fused"),
    ],
)
def test_a_table_keeps_the_budget_and_ties_what_runtimes_fuse(once, tmp_path, family, rows, tie):
    folder = once(tiny.make, family)
    scheme = parse_scheme(f"gptq-mix:budget=3.75:group=32:tie={tie}:members=348")
    with HiddenStates(tmp_path / "spill", 10**9, CPU) as states, torch.no_grad():
        model = opened(folder)
        feed = fed({scheme.spec: tmp_path / "table.json"})
        table = table_of(scheme.spec, model, feed, states, lambda *_: None, {})
        again = table_of(scheme.spec, None, feed, None, None, {})  # from the file
    assert table == again
    assert rows in (None, len(table))
    assert set("".join(table.values())) - {"0"} > {"3"}
    if tie == "fused":
        of_experts = {bits for name, bits in table.items() if "experts.*" in name}
        assert len(set("".join(of_experts))) == (family == "qwen2_moe")  # of all blocks
        first = next(name for name in table if name.endswith("q_proj")).removesuffix("q_proj")
        of_block = zip(*(table[f"{first}{name}_proj"] for name in "qkv"), strict=True)
        assert all(len(set(bits) - {"0"}) == 1 for bits in of_block)  # some share keys and values
    else:
        assert "mlp.experts.3.down_proj" in table


def test_linears_are_rounded_once_for_all_budgets_members_and_ties(once, tmp_path, monkeypatch):
    model, scored = opened(once(tiny.make, "llama")), []
    monkeypatch.setattr(
        "qaudit.engine.mixing.scores_of", lambda *a: scored.append(a) or scores_of(*a)
    )
    texts = ("budget=3.75", "budget=3.75:tie=none", "budget=5:members=458", "budget=5:damp=0.01")
    specs = [parse_scheme(f"gptq-mix:group=32:{text}").spec for text in texts]
    made = {}
    with HiddenStates(tmp_path, 10**9, CPU) as states, torch.no_grad():
        for name, some in (("together", specs), ("alone", specs[1:3])):
            feed = fed({spec: tmp_path / name / f"{k}.json" for k, spec in enumerate(specs)})
            given = (model, feed, states, lambda *_: None)
            scores = {}
            made[name] = [table_of(s, *given, scores if name == "together" else {}) for s in some]
            assert len(scored) == (2 if name == "together" else 4)
    assert made["together"][1:3] == made["alone"]


def test_a_budget_that_no_table_keeps_is_refused_with_the_least(once, tmp_path):
    folder = once(tiny.make, "llama")
    scheme = parse_scheme("gptq-mix:budget=3.25:group=32")
    feed = fed({scheme.spec: tmp_path / "table.json"})
    states = HiddenStates(tmp_path / "spill", 10**9, CPU)
    with torch.no_grad(), pytest.raises(SchemeError, match=r"take 3\.5 bits per weight") as error:
        table_of(scheme.spec, opened(folder), feed, states, lambda *_: None, {})
    assert "budget=3.75" in error.value.hint
    given = replace(scheme, table="abc")
    feed = fed({given.spec: tmp_path / "abc.json"})
    with pytest.raises(SchemeError, match="is not in"):
        table_of(given.spec, None, feed, None, None, {})
