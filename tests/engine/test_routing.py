"""Which experts quantized streams choose, beside full precision and with its choice replayed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qaudit.core.registry import parse_scheme
from qaudit.engine.read_out import evidence_of
from qaudit.engine.tally import Tally
from qaudit.engine.tokens import REFERENCE
from qaudit.errors import ModelError
from qaudit.model.blocks import ExpertOptions
from qaudit.types import Corpus, EvaluationDocument, Protocol, Routing
from tests.support import passes, released
from tests.support.filled import filled
from tests.support.passes import CALIBRATION, CONTEXT, EVALUATION, feed, losses, opened

WIDE: dict[str, Any] = {"vocab_size": 256, "max_position_embeddings": CONTEXT}
RTN = parse_scheme("rtn-4bit").spec
LAYERS = 2


def tallies_of(
    folder: Path, schemes: str, place: Path, limit: int = 10**9, **options: Any
) -> dict[str, Tally]:
    model = opened(folder, experts=ExpertOptions(**options))
    tallies: dict[str, Tally] = passes.tallies_of(model, schemes, place, limit=limit)
    return tallies


def routing_in(tally: Tally) -> Routing | None:
    documents = tuple(EvaluationDocument(f"{k}", f"{k}", 1) for k in range(len(EVALUATION)))
    corpus = Corpus(Protocol(CONTEXT, CONTEXT), (), tuple(EVALUATION), documents)
    return evidence_of(
        corpus, feed(), replace(tally, rows=[{"nll_N": nll_BT} for nll_BT in tally.nll])
    ).routing


def chosen(model: Any, tokens: Tensor, replayed: Any = None) -> tuple[Any, Tensor]:
    """Return what each layer's experts of a plain model are called with, and the logits."""
    layers: list[tuple[Tensor, Tensor]] = []
    hooks = []

    def called(layer: int, _: Any, args: tuple[Tensor, ...]) -> Any:
        layers.append((args[1], args[2]))
        return None if replayed is None else (args[0], *replayed[layer])

    for layer, block in enumerate(model.model.layers):
        hook = partial(called, layer)
        hooks.append(block.mlp.experts.register_forward_pre_hook(hook))
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return layers, logits


def pair(folder: Path, place: Path) -> tuple[Any, Any]:
    """Return a plain model, and the same with its matrices rounded in its files."""
    rounded = Path(shutil.copytree(folder, place / "rounded"))
    released.round_file(rounded)
    return released.plain(folder, "olmoe"), released.plain(rounded, "olmoe")


def shares(index_NK: Tensor, weights_NK: Tensor) -> Tensor:
    dense = torch.zeros(len(index_NK), 8).scatter_add_(1, index_NK, weights_NK)
    return dense / dense.sum(1, keepdim=True)


def test_agreement_and_moved_mass_are_those_of_two_plain_models(tmp_path: Path) -> None:
    folder = released.save(tmp_path / "model", "olmoe", **WIDE)
    tallies = tallies_of(folder, "rtn-4bit", tmp_path)
    routing = routing_in(tallies[RTN])
    assert routing is not None and routing.blocks.tolist() == [0, 1]
    base, rounded = pair(folder, tmp_path)
    for document, window in enumerate(EVALUATION):
        tokens = torch.from_numpy(window.tokens).long()[None]
        (full, _), (own, _) = chosen(base, tokens), chosen(rounded, tokens)
        scored = slice(window.scored_from, None)
        for layer in range(LAYERS):
            same = [set(a) == set(b) for a, b in zip(full[layer][0].tolist(), own[layer][0].tolist(), strict=True)]  # fmt: skip # noqa: E501
            moved = (shares(*full[layer]) - shares(*own[layer])).abs().sum(1) / 2
            assert routing.same[layer, document] == sum(same[scored])
            assert routing.moved[layer, document] == pytest.approx(float(moved[scored].sum()), rel=1e-4)  # fmt: skip # noqa: E501
    assert routing.same.sum() < LAYERS * sum(window.scored for window in EVALUATION)


def test_full_precision_and_models_without_experts_have_no_routing(
    tmp_path: Path, checkpoint: Path
) -> None:
    folder = released.save(tmp_path / "model", "olmoe", **WIDE)
    assert routing_in(tallies_of(folder, "rtn-4bit", tmp_path)["fp"]) is None
    assert routing_in(tallies_of(checkpoint, "rtn-4bit", tmp_path)[RTN]) is None


def test_tokens_that_are_scaled_by_their_router_have_a_routing_too(tmp_path: Path) -> None:
    folder = released.save(tmp_path / "model", "llama4_text", **WIDE)
    routing = routing_in(tallies_of(folder, "rtn-2bit", tmp_path)[parse_scheme("rtn-2bit").spec])
    scored = np.array([window.scored for window in EVALUATION])
    assert routing is not None and (routing.same < scored).any()
    assert (routing.moved > 0).any() and (routing.moved <= scored).all()


def test_a_perturbed_pass_is_compared_with_the_choice_of_full_precision(tmp_path: Path) -> None:
    folder = released.save(tmp_path / "model", "olmoe", **WIDE)
    tallies = passes.tallies_of(folder, "rtn-4bit", tmp_path, replace(feed(), perturbed=True))
    assert not tallies[REFERENCE].routing and tallies["fp"].routing and tallies[RTN].routing


def test_the_choice_of_full_precision_is_replayed(tmp_path: Path) -> None:
    folder = released.save(tmp_path / "model", "olmoe", **WIDE)
    tallies = tallies_of(folder, "rtn-4bit", tmp_path, replays=True)
    measured, expected = losses(feed(), tallies[RTN]), []
    base, rounded = pair(folder, tmp_path)
    for window in EVALUATION:
        tokens = torch.from_numpy(window.tokens).long()[None]
        full, _ = chosen(base, tokens)
        _, logits = chosen(rounded, tokens, replayed=full)
        nll = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")
        expected.append(float(nll[max(window.scored_from - 1, 0) :].double().sum()))
    np.testing.assert_allclose(measured, expected, rtol=1e-5)
    assert not tallies[RTN].routing
    assert any("routing=reference" in note for note in tallies[RTN].notes)
    own = losses(feed(), tallies_of(folder, "rtn-4bit", tmp_path)[RTN])
    assert np.abs(own - measured).max() > 1e-4


@pytest.mark.parametrize("scheme", ["gptq-2bit", "gptaq-2bit", "awq-2bit"])
def test_experts_are_calibrated_on_the_tokens_that_full_precision_sends(
    scheme: str, tmp_path: Path
) -> None:
    folder = released.save(tmp_path / "model", "olmoe", **WIDE)
    replay: Callable[..., Any] = partial(tallies_of, folder, scheme, tmp_path, replays=True)
    spec = parse_scheme(scheme).spec
    tally, returning = replay()[spec], replay(limit=1)[spec]
    base = released.plain(folder, "olmoe")
    counts = np.zeros((LAYERS, 8), dtype=int)
    for window in CALIBRATION:
        full, _ = chosen(base, torch.from_numpy(window.tokens).long()[None])
        for layer in range(LAYERS):
            counts[layer] += np.bincount(full[layer][0].flatten(), minlength=8)
    for layer, of_experts in filled(enumerate(tally.expert_tokens.values())):
        assert [of_experts[index] for index in range(8)] == counts[layer].tolist()
    np.testing.assert_array_equal(losses(feed(), tally), losses(feed(), returning))


def test_what_cannot_be_replayed_is_refused_by_name(tmp_path: Path) -> None:
    folder = released.save(tmp_path / "llama4", "llama4_text", **WIDE)
    with pytest.raises(ModelError, match="`Llama4TextExperts` scales tokens"):
        tallies_of(folder, "rtn-4bit", tmp_path, replays=True)
