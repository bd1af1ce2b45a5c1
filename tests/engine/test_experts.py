"""Experts are linears: each sees the tokens routed to it, and is quantized like any other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qaudit.core.linears import Linears, Quantized
from qaudit.core.registry import parse_scheme
from qaudit.engine.gathering import (
    capture_inputs,
    enough,
    groups_by_returning,
    groups_in_passing,
)
from qaudit.engine.read_out import evidence_of
from qaudit.engine.tokens import Feed
from qaudit.model.blocks import Block, BlockModel, ExpertOptions
from qaudit.saved.arrays import arrays_of
from qaudit.types import Corpus, Protocol
from tests.support import passes, released
from tests.support.filled import filled
from tests.support.passes import CALIBRATION, CONTEXT, opened, run

WIDE: dict[str, Any] = {"vocab_size": 256, "max_position_embeddings": CONTEXT}
FAMILIES = ["gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return tokens of two batches, the second padded, and which are valid."""
    valid = torch.ones(2, 24, dtype=torch.bool)
    padded = valid.clone()
    padded[1, 15:] = False
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(3, 250, (2, 24), generator=generator), v) for v in (valid, padded)]


def first_block(model: BlockModel) -> tuple[Block, list[tuple[Tensor, Tensor]], Iterator[Block]]:
    hidden = [(model.embed(tokens), valid) for tokens, valid in batches()]
    blocks = model.blocks()
    return next(blocks), hidden, blocks


def plain_losses(folder: Path, family: str) -> np.ndarray:
    return passes.plain_losses(released.plain(folder, family))


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_in_full_precision_and_rounded_are_those_of_the_library(
    family: str, tmp_path: Path
) -> None:
    folder = released.save(tmp_path / "model", family, **WIDE)
    losses, tallies = run(folder, "rtn-4bit", tmp_path)
    np.testing.assert_allclose(losses["fp"], plain_losses(folder, family), rtol=1e-5)
    released.round_file(folder)
    spec = parse_scheme("rtn-4bit").spec
    np.testing.assert_allclose(losses[spec], plain_losses(folder, family), rtol=1e-5)
    gates = ("gate", "router", "shared_expert_gate")
    assert not any(name.rpartition(".")[2] in gates for name in tallies[spec].linears)
    left = " ".join(tallies[spec].notes)
    assert "left as they are" in left and ("shared_expert_gate" in left) == (family == "qwen2_moe")


def test_an_expert_is_calibrated_on_the_tokens_routed_to_it(tmp_path: Path) -> None:
    folder = released.save(tmp_path, "mixtral", **WIDE)
    block, hidden, _ = first_block(opened(folder))
    captured = capture_inputs(block, hidden)
    plain = released.plain(folder, "mixtral")
    grams, inners, counts = torch.zeros(8, 32, 32), torch.zeros(8, 64, 64), [0] * 8

    def count(module: Any, args: tuple[Tensor, Tensor, Tensor]) -> None:
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


def test_down_reads_what_quantized_gate_and_up_make_in_its_own_stream_alone(tmp_path: Path) -> None:
    block, hidden, _ = first_block(opened(released.save(tmp_path, "olmoe", **WIDE)))
    captured = capture_inputs(block, hidden)
    before: dict[str, Tensor] = {}
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


def test_linears_beside_experts_leave_padding_out(tmp_path: Path) -> None:
    block, hidden, _ = first_block(opened(released.save(tmp_path, "qwen2_moe", **WIDE)))
    captured = capture_inputs(block, hidden)
    shared = [group for group in block.groups if "shared_expert." in group.name]
    everything = sum(int(valid.sum()) for _, valid in hidden)
    assert [captured.get(group).tokens for group in shared] == [everything] * 2


@pytest.mark.parametrize("walk", ["inside", "returning"])
def test_two_streams_are_compared_token_by_token(walk: str, tmp_path: Path) -> None:
    block, hidden, _ = first_block(opened(released.save(tmp_path, "olmoe", **WIDE)))
    given: dict[str, list[Tensor]] = {}
    for read in capture_inputs(block, hidden).routed["mlp.experts"]:
        given.setdefault("mlp.experts", []).append(2 * read.hidden_NH)

    def beside(group: Any, k: int) -> Tensor | None:
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


def test_an_expert_without_a_token_is_rounded_to_nearest(tmp_path: Path) -> None:
    folder = released.save(tmp_path, "olmoe", **WIDE, num_experts=64)
    block, hidden, _ = first_block(opened(folder))
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


def test_tokens_of_each_expert_are_in_the_evidence_and_a_note_counts_those_without(
    tmp_path: Path,
) -> None:
    folder = released.save(tmp_path / "model", "olmoe", **WIDE, num_experts=64)
    _, tallies = run(folder, "gptq-4bit", tmp_path)
    tally = tallies[parse_scheme("gptq-4bit").spec]
    empty = Corpus(Protocol(context=CONTEXT), (), (), ())
    evidence = evidence_of(empty, Feed((), ()), replace(tally, rows=[], routing={}))
    counts = evidence.expert_tokens
    assert counts is not None and counts[:, 0].tolist() == [0, 1] and counts.shape == (2, 65)
    calibration = sum(len(w.tokens) for w in CALIBRATION)
    assert counts[:, 1:].sum(1).tolist() == [2 * calibration] * 2
    without = int((counts[:, 1:] == 0).sum())
    assert without and tally.notes[-1].startswith(
        f"{without} of 128 experts saw no calibration token and are rounded to nearest"
    )
    again = arrays_of(evidence)
    np.testing.assert_array_equal(again["expert_tokens"], counts)


def test_what_differs_for_experts_is_part_of_a_results_identity() -> None:
    texts = {ExpertOptions().text, ExpertOptions(replays=True).text}
    assert "" in texts and len(texts) == 2


def test_columns_that_no_token_moved_keep_their_weights(tmp_path: Path) -> None:
    block, hidden, _ = first_block(opened(released.save(tmp_path, "olmoe", **WIDE)))
    inputs = capture_inputs(block, hidden).get(block.groups[-1])
    dead = copy.deepcopy(inputs)
    dead.gram_CC[:3], dead.gram_CC[:, :3] = 0, 0
    mean = dead.gram_CC.diagonal().mean()
    kept = enough(dead)
    torch.testing.assert_close(kept.gram_CC.diagonal()[:3], mean.expand(3))
    linears = block.linears(block.groups[-1], kept)
    (weight,) = parse_scheme("gptq-4bit").quantize(linears).weights.values()
    assert bool((weight[:, :3] != 0).any())


def test_a_gate_that_is_left_does_not_move_the_linears_that_read_what_it_reads(
    tmp_path: Path,
) -> None:
    folder = released.save(tmp_path / "model", "llama4_text", **WIDE)
    losses, tallies = run(folder, "gptq-4bit", tmp_path)  # batches wait at doors as they come
    spec = parse_scheme("gptq-4bit").spec
    assert np.isfinite(losses[spec]).all()
    assert "feed_forward.shared_expert.gate_proj" in tallies[spec].linears
    np.testing.assert_allclose(losses["fp"], plain_losses(folder, "llama4_text"), rtol=1e-5)


@pytest.mark.parametrize(("family", "folds"), [("olmoe", True), ("gpt_oss", False)])
def test_scales_of_down_fold_into_up_where_that_is_exact(
    family: str, folds: bool, tmp_path: Path
) -> None:
    block, _, _ = first_block(opened(released.save(tmp_path, family, **WIDE)))
    group = next(g for g in block.groups if g.name == "mlp.experts.3.down_proj")
    assert (group.source is not None) is folds
    if group.source is not None:
        assert group.source.name == "mlp.experts.3.up_proj"


def test_a_copy_for_proofs_has_one_expert(tmp_path: Path) -> None:
    block, _, _ = first_block(opened(released.save(tmp_path, "olmoe", **WIDE)))
    copied = [name for name, _ in copy.deepcopy(block.module).named_parameters() if "exp" in name]
    assert copied == [f"mlp.experts.0.{role}_proj.weight" for role in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w3.weight"),
        ("olmoe", "model.layers.1.mlp.experts.3.up_proj.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight"),
        ("gpt_oss", ""),  # stored as one tensor
    ],
)
def test_an_experts_linear_has_the_name_it_is_stored_under(
    family: str, name: str, tmp_path: Path
) -> None:
    folder = released.save(tmp_path, family, **WIDE)
    assert opened(folder).stored_name(1, "mlp.experts.3.up_proj") == name
    if name:
        assert name in load_file(folder / "model.safetensors")


@pytest.mark.parametrize("scheme", ["gptq-4bit", "awq-4bit"])
def test_the_preset_of_llm_compressor_calibrates_every_expert_on_all_tokens(
    scheme: str, tmp_path: Path
) -> None:
    folder = released.save(tmp_path / "model", "olmoe", **WIDE)
    given: dict[str, Linears] = {}
    lent: list[int] = []

    def keep(_: Any, linears: Linears, __: Any) -> None:
        given["+".join(linears.weights)] = linears
        if linears.tokens is not None:  # lent while the block is passed
            lent.append(sum(len(x_TC) for x_TC in linears.tokens()))

    spec = parse_scheme(f"{scheme}:preset=llm-compressor").spec
    assert "all_tokens=true" in spec
    _, tallies = run(folder, spec, tmp_path, observe=keep)
    tokens = sum(len(window.tokens) for window in CALIBRATION)
    of_experts = [linears for name, linears in given.items() if ".experts." in name]
    assert len(of_experts) == 16
    for linears in of_experts:
        assert linears.inputs is not None and linears.inputs.tokens == tokens
    assert set(lent) == ({tokens} if scheme == "awq-4bit" else set())
    assert not any("rounded to nearest" in note for note in tallies[spec].notes)
