"""Losses, divergence and agreement of every stream, held against whole models in float64."""

import shutil
from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qaudit.core.fidelity import Reference, head_rows
from qaudit.core.registry import parse_schemes
from qaudit.engine.batches import make_batches
from qaudit.engine.read_out import evidence_of, position_edges, rows_of
from qaudit.engine.tally import Tally, timed
from qaudit.engine.tokens import Feed
from qaudit.model.blocks import BlockModel
from qaudit.types import FULL_PRECISION, ROLES, UNSCORED
from tests.support.filled import filled
from tests.support.passes import (
    CONTEXT,
    CORPUS,
    CPU,
    EVALUATION,
    feed,
    on_llama,
    plain_model,
    tallies_of,
)

SCHEMES = parse_schemes(["rtn-4bit:group=32,rtn-2bit:group=32"])


@pytest.fixture
def tallies(finished):
    names = (FULL_PRECISION, *(scheme.spec for scheme in SCHEMES))
    return {name: finished.tallies[name] for name in names}


def evidence(tallies, corpus=CORPUS, given=None):
    given, full = given or feed(), tallies[FULL_PRECISION]
    return {spec: evidence_of(corpus, given, tally, full) for spec, tally in tallies.items()}


@cache
@torch.no_grad()
def whole(folder, scheme=None):
    """Return float64 log-probabilities of each window, and what the last block returns of it."""
    model, windows, outputs = plain_model(folder, scheme), [], []
    model.model.layers[-1].register_forward_hook(
        lambda _, args, out: outputs.append((out[0] if isinstance(out, tuple) else out).double())
    )
    for window in EVALUATION:
        tokens_1T = torch.from_numpy(window.tokens.astype("int64"))[None]
        logits_TV = model(input_ids=tokens_1T, use_cache=False).logits[0, :-1]
        output_TD = outputs[-1].reshape(-1, outputs[-1].shape[-1])[:-1]
        windows.append((logits_TV.double().log_softmax(-1).numpy(), output_TD))
    return windows


def compared(folder, scheme):
    """Yield what a scheme changes at each scored token, window by window."""
    pairs = zip(EVALUATION, whole(folder), whole(folder, scheme), strict=True)
    for window, (p_TV, p_TD), (q_TV, q_TD) in filled(pairs):
        targets_T, rows = window.tokens[1:], np.arange(len(window.tokens) - 1)
        yield SimpleNamespace(
            kl_T=(np.exp(p_TV) * (p_TV - q_TV)).sum(1),
            dp_T=np.exp(q_TV[rows, targets_T]) - np.exp(p_TV[rows, targets_T]),
            nll_T=-q_TV[rows, targets_T],
            top_T=np.exp(p_TV.max(1)),
            flip_T=p_TV.argmax(1) != q_TV.argmax(1),
            error_T=(q_TD - p_TD).square().sum(1) / p_TD.square().sum(1),
        )


def test_evidence_is_that_of_whole_models_in_float64(checkpoint, tallies):
    found = evidence(tallies)
    assert found[FULL_PRECISION].output_error is None
    for scheme in SCHEMES:
        stored, error = found[scheme.spec].fidelity, found[scheme.spec].output_error
        for k, of in enumerate(compared(checkpoint, scheme)):
            # The model itself is computed in float32 by other sums: logits differ by about 1e-6
            # of their size, a divergence by as much of its square root.
            np.testing.assert_allclose(stored.kl_sum[k], of.kl_T.sum(), rtol=1e-3, atol=1e-9)
            np.testing.assert_allclose(stored.kl_max[k], of.kl_T.max(), rtol=1e-3, atol=1e-9)
            np.testing.assert_allclose(stored.squared_dp_sum[k], (of.dp_T**2).sum(), rtol=1e-3)
            # A tie, or a difference that rounding turns, may move one token.
            assert abs(int(stored.same_top[k]) - int((~of.flip_T).sum())) <= 1
            assert int(stored.kl_counts[k].sum()) == len(of.kl_T)
            # Two float32 computations of states of size 1: differences of 1e-7 beside 1e-2.
            scored_T = of.error_T[EVALUATION[k].scored_from - 1 :]
            np.testing.assert_allclose(error[k], float(scored_T.sum()), rtol=1e-4)


@on_llama
def test_sums_by_confidence_are_those_of_whole_models_in_float64(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "sharp")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 32.0  # sure of some tokens
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found, reached = evidence(tallies_of(folder, SCHEMES, tmp_path)), np.zeros(4, dtype=int)
    for scheme in SCHEMES:
        stored = found[scheme.spec].fidelity.by_confidence
        for k, of in enumerate(compared(folder, scheme)):
            edges = (0.0, 0.25, 0.5, 0.9, 1.1)
            for bucket in range(4):
                inside = (edges[bucket] <= of.top_T) & (of.top_T < edges[bucket + 1])
                assert stored.tokens[k, bucket] == inside.sum()
                kl = of.kl_T[inside].sum()
                np.testing.assert_allclose(stored.kl_sum[k, bucket], kl, rtol=2e-3, atol=1e-6)
                assert abs(stored.flips[k, bucket] - (of.flip_T & inside).sum()) <= 1
        reached += stored.tokens.sum(0)
        assert stored.flips[:, 2:].sum() > 0 or scheme.bits == 4
    assert (reached > 0).all()


@on_llama
def test_sums_by_role_are_those_of_whole_models_in_float64(checkpoint, tmp_path):
    random = np.random.default_rng(3)
    windows = tuple(  # with a role for each token, some of them not scored
        replace(w, roles=random.integers(UNSCORED, len(ROLES), len(w.tokens)).astype(np.int8))
        for w in EVALUATION
    )
    corpus = replace(CORPUS, evaluation=windows)
    given = replace(feed(), evaluation=make_batches(windows, CONTEXT, 160))
    (scheme, _) = SCHEMES
    tallies = tallies_of(checkpoint, SCHEMES, tmp_path, given)
    stored = evidence(tallies, corpus, given)[scheme.spec]
    for k, of in enumerate(compared(checkpoint, scheme)):
        roles_T = windows[k].roles[1:]
        for role, _ in enumerate(ROLES):
            inside, sums = roles_T == role, stored.roles
            assert sums.tokens[k, role] == inside.sum()
            np.testing.assert_allclose(sums.nll_sum[k, role], of.nll_T[inside].sum(), rtol=1e-4)
            kl = of.kl_T[inside].sum()
            np.testing.assert_allclose(sums.kl_sum[k, role], kl, rtol=1e-3, atol=1e-9)
        scored = roles_T != UNSCORED
        assert stored.tokens[k] == scored.sum() == windows[k].scored
        np.testing.assert_allclose(stored.nll_sum[k], of.nll_T[scored].sum(), rtol=1e-4)
        np.testing.assert_allclose(stored.fidelity.kl_sum[k], of.kl_T[scored].sum(), rtol=1e-3)


@on_llama
def test_streams_do_not_depend_on_what_is_read_out_of_others(
    checkpoint, tallies, tmp_path, monkeypatch
):
    given = feed()
    apart = Feed(given.calibration, given.evaluation, compared=False)
    for spec, tally in filled(tallies_of(checkpoint, SCHEMES, tmp_path / "a", apart).items()):
        assert tally.kl == []
        for nll, same in filled(zip(tally.nll, tallies[spec].nll, strict=True)):
            assert torch.equal(nll, same)
    # Full precision runs for the comparison, and streams share the rows that are in memory.
    counts, logits = [], BlockModel.logits

    def counted(model, hidden_BTD):
        counts.append(hidden_BTD.shape[1])
        return logits(model, hidden_BTD)

    monkeypatch.setattr(BlockModel, "logits", counted)
    later = Feed(given.calibration, given.evaluation, full_precision=False)
    for spec, tally in filled(tallies_of(checkpoint, SCHEMES, tmp_path / "b", later).items()):
        assert all(torch.equal(a, b) for a, b in zip(tally.kl, tallies[spec].kl, strict=True))
    assert max(counts) == 3 * (head_rows(256, "cpu") // 3)  # those of three streams


def test_sums_by_position_add_up_to_those_of_documents(tallies):
    for stored in filled(evidence(tallies).values()):
        places = stored.positions
        assert places.edges.tolist() == [0, 16, CONTEXT]
        assert (places.tokens.sum(1) == stored.tokens).all()
        np.testing.assert_allclose(places.nll_sum.sum(1), stored.nll_sum)
        expected = [[min(len(w.tokens), 16) - 1, max(len(w.tokens) - 16, 0)] for w in EVALUATION]
        assert places.tokens.tolist() == expected
        if stored.fidelity is not None:
            np.testing.assert_allclose(places.kl_sum.sum(1), stored.fidelity.kl_sum)
    for context, *edges in ((1,), (16,), (17, 16), (2048, 16, 64, 256, 1024)):  # grow fourfold
        assert position_edges(context).tolist() == [0, *edges, context]


def test_another_vocabulary_is_not_compared_and_streams_share_the_seconds(monkeypatch):
    clock = iter([1.0, 4.0])
    monkeypatch.setattr("qaudit.engine.tally.time.perf_counter", lambda: next(clock))
    tallies = Tally(), Tally()
    with timed(CPU, *tallies):
        pass
    assert [tally.seconds for tally in tallies] == [1.5, 1.5]
    tally, targets_N = Tally(), torch.tensor([1, 0])
    reference, logits_NV = Reference.of(torch.randn(2, 8), targets_N), torch.randn(2, 9)
    rows = rows_of(tally, reference, logits_NV, targets_N)
    assert rows.kl_N is None
    expected_N = torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="none")
    torch.testing.assert_close(rows.nll_N, expected_N)
    (note,) = tally.notes
    assert note.endswith("its vocabulary is 9 tokens, that of full precision 8")


@on_llama
def test_logits_that_are_not_finite_leave_the_others_as_they_are(checkpoint, tallies):
    tallies = deepcopy(tallies)
    broken, sound = list(tallies)[1:]
    before = evidence(tallies)[sound]
    tallies[broken].kl[0][0, 3] = float("nan")
    after = evidence(tallies)
    assert (after[broken].fidelity, after[broken].positions.kl_sum) == (None, None)
    assert f"at 1 of {int(before.tokens.sum())} tokens" in tallies[broken].notes[-1]
    np.testing.assert_array_equal(after[sound].fidelity.kl_sum, before.fidelity.kl_sum)
