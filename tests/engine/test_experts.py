"""Experts are linears: each sees the tokens routed to it, and is quantized like any other.

Which experts quantized streams choose, beside full precision and with its choice replayed.
"""

import copy
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from qaudit.core.linears import Quantized
from qaudit.core.registry import parse_scheme
from qaudit.engine.gathering import capture_inputs, enough, groups_by_returning, groups_in_passing
from qaudit.engine.read_out import evidence_of
from qaudit.engine.tokens import REFERENCE, Feed
from qaudit.errors import ModelError
from qaudit.model.blocks import ExpertOptions
from qaudit.saved.arrays import arrays_of
from qaudit.types import Corpus, Protocol
from tests.support import passes, released
from tests.support.filled import filled
from tests.support.passes import (
    CALIBRATION,
    CONTEXT,
    CORPUS,
    EVALUATION,
    feed,
    losses,
    opened,
    run,
    spec_of,
)

WIDE = {"vocab_size": 256, "max_position_embeddings": CONTEXT}
RTN, LAYERS = spec_of("rtn-4bit"), 2


def batches():
    """Return tokens of two batches, the second padded, and which are valid."""
    valid = torch.ones(2, 24, dtype=torch.bool)
    padded = valid.clone()
    padded[1, 15:] = False
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(3, 250, (2, 24), generator=generator), v) for v in (valid, padded)]


@pytest.fixture
def saved(once):
    """Return a function: a tiny model of a family."""
    return partial(once, released.save, **WIDE)


@pytest.fixture
def first_block(saved):
    """Return a function: the first block of a model, and what enters it."""
    walks = []

    def first(family, **changes):
        model = opened(saved(family, **changes))
        hidden = [(model.embed(tokens), valid) for tokens, valid in batches()]
        walks.append(model.blocks())  # held: a walk that is dropped gives its block back
        return next(walks[-1]), hidden

    return first


def plain_losses(folder, family):
    return passes.plain_losses(released.plain(folder, family))


def with_routing(spill, folder, schemes, limit=10**9, **options):
    model = opened(folder, experts=ExpertOptions(**options))
    return passes.tallies_of(model, schemes, spill, limit=limit)


def rounded(folder, source):
    """Return a copy whose matrices are rounded in its files."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    released.round_file(folder)
    return folder


STORED = {  # what the last block's fourth up is called; in gpt_oss all are one tensor
    "gpt_oss": "",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w3.weight",
    **dict.fromkeys(
        ("olmoe", "qwen2_moe", "qwen3_moe"), "model.layers.1.mlp.experts.3.up_proj.weight"
    ),
}


@pytest.mark.parametrize("family", STORED)
def test_losses_and_names_are_those_of_the_library(family, saved, once):
    folder, name = saved(family), STORED[family]
    assert opened(folder).stored_name(1, "mlp.experts.3.up_proj") == name
    assert not name or name in load_file(folder / "model.safetensors")
    tallies = once(with_routing, folder, "rtn-4bit")
    found = [losses(feed(), tallies[name]) for name in ("fp", RTN)]
    np.testing.assert_allclose(found[0], plain_losses(folder, family), rtol=1e-5)
    np.testing.assert_allclose(found[1], plain_losses(once(rounded, folder), family), rtol=1e-5)
    gates = ("gate", "router", "shared_expert_gate")
    assert not any(name.rpartition(".")[2] in gates for name in tallies[RTN].linears)
    notes = " ".join(tallies[RTN].notes)
    assert "left as they are" in notes and ("shared_expert_gate" in notes) == (
        family == "qwen2_moe"
    )


def test_an_expert_is_calibrated_on_the_tokens_routed_to_it(saved, first_block):
    block, hidden = first_block("mixtral")
    captured = capture_inputs(block, hidden)
    plain = released.plain(saved("mixtral"), "mixtral")
    grams, inners, counts = torch.zeros(8, 32, 32), torch.zeros(8, 64, 64), [0] * 8

    def count(module, args):
        x_NH, index_NK, _ = args
        for expert in range(8):
            x_TH = x_NH[(index_NK == expert).any(1)]
            gate, up = torch.nn.functional.linear(x_TH, module.gate_up_proj[expert]).chunk(2, -1)
            inner = torch.nn.functional.silu(gate) * up
            grams[expert] += x_TH.T @ x_TH
            inners[expert] += inner.T @ inner
            counts[expert] += len(x_TH)

    plain.model.layers[0].mlp.experts.register_forward_pre_hook(count)
    for tokens, valid in batches():
        for row, kept in zip(tokens, valid, strict=True):
            with torch.no_grad():
                plain(input_ids=row[kept][None], use_cache=False)
    for group in filled(block.groups):
        if group.expert is None:
            continue
        inputs = captured.get(group)
        wanted = (inners if group.expert.is_down else grams)[group.expert.index]
        assert inputs.seen == counts[group.expert.index]
        torch.testing.assert_close(inputs.gram_CC, wanted, rtol=1e-4, atol=1e-5)


def test_down_reads_what_quantized_gate_and_up_make_in_its_own_stream_alone(first_block):
    block, hidden = first_block("olmoe")
    captured = capture_inputs(block, hidden)
    before = {}
    for group, inputs in filled(groups_in_passing(block, hidden, [])):
        before[group.name] = captured.get(group).gram_CC
        if group.expert is not None and not group.expert.is_down:
            doubled = {name: 2 * block.weight(name) for name in group.linears[1:]}
            block.install(Quantized(doubled, 0))
        if group.expert is not None and group.expert.is_down:
            torch.testing.assert_close(inputs.gram_CC, 4 * before[group.name])
    for group in filled(block.groups):
        if group.expert is not None:
            torch.testing.assert_close(captured.get(group).gram_CC, before[group.name])


def test_linears_beside_experts_leave_padding_out(first_block):
    block, hidden = first_block("qwen2_moe")
    captured = capture_inputs(block, hidden)
    shared = [group for group in block.groups if "shared_expert." in group.name]
    everything = sum(int(valid.sum()) for _, valid in hidden)
    assert [captured.get(group).tokens for group in shared] == [everything] * 2


@pytest.mark.parametrize("walk", ["inside", "returning"])
def test_two_streams_are_compared_token_by_token(walk, first_block):
    block, hidden = first_block("olmoe")
    given = {}
    for read in capture_inputs(block, hidden).routed["mlp.experts"]:
        given.setdefault("mlp.experts", []).append(2 * read.hidden_NH)

    def beside(group, k):
        return given[group.door][k] if group.expert is not None else None

    walked = (
        groups_in_passing(block, hidden, [], beside)
        if walk == "inside"
        else groups_by_returning(block, lambda: iter(hidden), beside)
    )
    for group, inputs in filled(walked):
        if group.expert is not None and not group.expert.is_down:
            assert inputs.drift_CC is not None  # of 2 x beside x: as large as the Gram matrix
            torch.testing.assert_close(inputs.drift_CC, inputs.gram_CC)


def test_experts_without_tokens_are_rounded_to_nearest_and_dead_columns_kept(first_block):
    block, hidden = first_block("olmoe", num_experts=64)
    captured = capture_inputs(block, hidden)
    unseen = [g for g in block.groups if g.expert is not None and captured.get(g).seen == 0]
    assert unseen
    for group in filled(unseen):
        gptq, rtn = (
            parse_scheme(name).quantize(block.linears(group, captured.get(group)))
            for name in ("gptq-4bit", "rtn-4bit")
        )
        for name, weight in rtn.weights.items():
            torch.testing.assert_close(gptq.weights[name], weight)
    seen = next(g for g in block.groups[::-1] if captured.get(g).seen > 1)
    dead = copy.deepcopy(captured.get(seen))
    dead.gram_CC[:3], dead.gram_CC[:, :3] = 0, 0
    mean = dead.gram_CC.diagonal().mean()
    kept = enough(dead)
    torch.testing.assert_close(kept.gram_CC.diagonal()[:3], mean.expand(3))
    for weight in parse_scheme("gptq-4bit").quantize(block.linears(seen, kept)).weights.values():
        assert bool((weight[:, :3] != 0).any())


def test_tokens_of_each_expert_are_in_the_evidence_and_a_note_counts_those_without(saved, tmp_path):
    _, tallies = run(saved("olmoe", num_experts=64), "gptq-4bit", tmp_path)
    tally = tallies[spec_of("gptq-4bit")]
    empty = Corpus(Protocol(context=CONTEXT), (), (), ())
    evidence = evidence_of(empty, Feed((), ()), replace(tally, rows=[], routing={}))
    counts = evidence.expert_tokens
    assert counts[:, 0].tolist() == [0, 1] and counts.shape == (2, 65)
    calibration = sum(len(w.tokens) for w in CALIBRATION)
    assert counts[:, 1:].sum(1).tolist() == [2 * calibration] * 2
    without = int((counts[:, 1:] == 0).sum())
    note = f"{without} of 128 experts saw no calibration token and are rounded to nearest"
    assert without and tally.notes[-1].startswith(note)
    np.testing.assert_array_equal(arrays_of(evidence)["expert_tokens"], counts)


def test_tokens_that_are_scaled_by_their_router_have_a_routing_and_gates_are_left(saved, tmp_path):
    folder = saved("llama4_text")
    tallies = with_routing(tmp_path, folder, "gptq-4bit,rtn-2bit")  # batches wait as they come
    assert np.isfinite(losses(feed(), tallies[spec_of("gptq-4bit")])).all()
    assert "feed_forward.shared_expert.gate_proj" in tallies[spec_of("gptq-4bit")].linears
    found = losses(feed(), tallies["fp"])
    np.testing.assert_allclose(found, plain_losses(folder, "llama4_text"), rtol=1e-5)
    routing = routing_in(tallies[spec_of("rtn-2bit")])
    scored = np.array([window.scored for window in EVALUATION])
    assert (routing.same < scored).any()
    assert (routing.moved > 0).any() and (routing.moved <= scored).all()
    with pytest.raises(ModelError, match="`Llama4TextExperts` scales tokens"):
        with_routing(tmp_path, folder, "rtn-4bit", replays=True)


@pytest.mark.parametrize(("family", "folds"), [("olmoe", True), ("gpt_oss", False)])
def test_scales_of_down_fold_into_up_where_that_is_exact(family, folds, first_block):
    block, _ = first_block(family)
    group = next(g for g in block.groups if g.name == "mlp.experts.3.down_proj")
    assert (group.source is not None) is folds
    if folds:
        assert group.source.name == "mlp.experts.3.up_proj"
        copied = [name for name, _ in copy.deepcopy(block.module).named_parameters()]
        of_experts = [f"mlp.experts.0.{role}_proj.weight" for role in ("gate", "up", "down")]
        assert [name for name in copied if "exp" in name] == of_experts  # for proofs one


def test_the_preset_of_llm_compressor_calibrates_every_expert_on_all_tokens(saved, tmp_path):
    specs = [spec_of(f"{name}-4bit:preset=llm-compressor") for name in ("gptq", "awq")]
    assert all("all_tokens=true" in spec for spec in specs)
    texts = {ExpertOptions().text, ExpertOptions(replays=True).text}  # of a result's identity
    assert "" in texts and len(texts) == 2
    tokens = sum(len(window.tokens) for window in CALIBRATION)
    of_experts, lent = [], []

    def keep(scheme, linears, _):
        if ".experts." in "+".join(linears.weights):
            of_experts.append((scheme.spec, linears.inputs.tokens))
        if linears.tokens is not None:  # lent while the block is passed
            lent.append((scheme.spec, sum(len(x_TC) for x_TC in linears.tokens())))

    _, tallies = run(saved("olmoe"), ",".join(specs), tmp_path, observe=keep)
    counts = [(spec, tokens) for spec in specs]
    assert Counter(of_experts) == dict.fromkeys(counts, 32)  # two groups of each, in two blocks
    assert set(lent) == {counts[1]}
    for spec in specs:
        assert not any("rounded to nearest" in note for note in tallies[spec].notes)


# ---------------------------------------------------------------- which experts streams choose


def routing_in(tally):
    rows = [{"nll_N": nll_BT} for nll_BT in tally.nll]
    return evidence_of(CORPUS, feed(), replace(tally, rows=rows)).routing


def chosen(model, window, replayed=None):
    """Return what each layer's experts of a plain model are called with, and the logits."""
    layers, hooks = [], []

    def called(layer, _, args):
        layers.append((args[1], args[2]))
        return None if replayed is None else (args[0], *replayed[layer])

    for layer, block in enumerate(model.model.layers):
        hook = partial(called, layer)
        hooks.append(block.mlp.experts.register_forward_pre_hook(hook))
    with torch.no_grad():
        tokens = torch.from_numpy(window.tokens).long()[None]
        logits = model(input_ids=tokens, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return layers, logits


@pytest.fixture
def pair(once, saved):
    """Return a plain model, and the same with its matrices rounded in its files."""
    folder = saved("olmoe")
    return [released.plain(each, "olmoe") for each in (folder, once(rounded, folder))]


def shares(index_NK, weights_NK):
    dense = torch.zeros(len(index_NK), 8).scatter_add_(1, index_NK, weights_NK)
    return dense / dense.sum(1, keepdim=True)


def test_agreement_and_moved_mass_are_those_of_two_plain_models(saved, once, pair):
    tallies = once(with_routing, saved("olmoe"), "rtn-4bit")
    routing = routing_in(tallies[RTN])
    assert routing.blocks.tolist() == [0, 1]
    for document, window in enumerate(EVALUATION):
        (full, _), (ours, _) = (chosen(model, window) for model in pair)
        scored = slice(window.scored_from, None)
        for layer in range(LAYERS):
            sets = (full[layer][0].tolist(), ours[layer][0].tolist())
            same = [set(a) == set(b) for a, b in zip(*sets, strict=True)]
            moved = (shares(*full[layer]) - shares(*ours[layer])).abs().sum(1) / 2
            assert routing.same[layer, document] == sum(same[scored])
            expected = pytest.approx(float(moved[scored].sum()), rel=1e-4)
            assert routing.moved[layer, document] == expected
    assert routing.same.sum() < LAYERS * sum(window.scored for window in EVALUATION)
    assert routing_in(tallies["fp"]) is None


def test_a_perturbed_pass_is_compared_with_the_choice_of_full_precision(saved, tmp_path):
    given = replace(feed(), perturbed=True)
    tallies = passes.tallies_of(saved("olmoe"), "rtn-4bit", tmp_path, given)
    assert not tallies[REFERENCE].routing and tallies["fp"].routing and tallies[RTN].routing


REPLAYED = ("gptq-2bit", "gptaq-2bit", "awq-2bit")


def test_the_choice_of_full_precision_is_replayed(saved, once, pair, tmp_path):
    folder, every = saved("olmoe"), ",".join(("rtn-4bit", *REPLAYED))
    tallies = with_routing(tmp_path / "inside", folder, every, replays=True)
    returning = with_routing(tmp_path / "returning", folder, every, limit=1, replays=True)
    measured, expected = losses(feed(), tallies[RTN]), []
    for window in EVALUATION:
        full, _ = chosen(pair[0], window)
        _, logits = chosen(pair[1], window, replayed=full)
        targets = torch.from_numpy(window.tokens).long()[1:]
        nll = torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none")
        expected.append(float(nll[max(window.scored_from - 1, 0) :].double().sum()))
    np.testing.assert_allclose(measured, expected, rtol=1e-5)
    assert not tallies[RTN].routing
    assert any("routing=reference" in note for note in tallies[RTN].notes)
    unreplayed = losses(feed(), once(with_routing, folder, "rtn-4bit")[RTN])
    assert np.abs(unreplayed - measured).max() > 1e-4
    # Experts are calibrated on the tokens that full precision sends.
    counts = np.zeros((LAYERS, 8), dtype=int)
    for window in CALIBRATION:
        full, _ = chosen(pair[0], window)
        for layer in range(LAYERS):
            counts[layer] += np.bincount(full[layer][0].flatten(), minlength=8)
    for spec in map(spec_of, REPLAYED):
        for layer, of_experts in filled(enumerate(tallies[spec].expert_tokens.values())):
            assert [of_experts[index] for index in range(8)] == counts[layer].tolist()
        np.testing.assert_array_equal(*(losses(feed(), t[spec]) for t in (tallies, returning)))
