"""Losses, divergence and agreement of every stream, held against whole models in float64."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qaudit.core.fidelity import Reference
from qaudit.core.registry import parse_schemes
from qaudit.engine.batches import make_batches
from qaudit.engine.read_out import evidence_of, position_edges, rows_of
from qaudit.engine.tally import Tally, timed
from qaudit.engine.tokens import Feed
from qaudit.model.blocks import BlockModel
from qaudit.types import FULL_PRECISION, ROLES, UNSCORED, Corpus, EvaluationDocument, Protocol
from tests.support.filled import filled
from tests.support.passes import CONTEXT, CPU, EVALUATION, feed, on_llama, plain_model, tallies_of

SCHEMES = "rtn-4bit:group=32,rtn-2bit:group=32"
CORPUS = Corpus(
    Protocol(CONTEXT, CONTEXT),
    (),
    tuple(EVALUATION),
    tuple(EvaluationDocument(f"d{k}", f"{k}" * 64, 40) for k in range(len(EVALUATION))),
)


def blocks(folder, tmp_path, given):
    return tallies_of(folder, SCHEMES, tmp_path, given)


def evidence(given, tallies):
    full = tallies[FULL_PRECISION]
    return {spec: evidence_of(CORPUS, given, tally, full) for spec, tally in tallies.items()}


@torch.no_grad()
def log_probabilities(folder, scheme=None):
    """Return float64 log-probabilities of every scored token's rows, window by window."""
    model, found = plain_model(folder, scheme), []
    for window in EVALUATION:
        tokens_1T = torch.from_numpy(window.tokens.astype("int64"))[None]
        logits_TV = model(input_ids=tokens_1T, use_cache=False).logits[0, :-1]
        found.append((logits_TV.double().log_softmax(-1).numpy(), window.tokens[1:]))
    return found


def test_evidence_is_that_of_whole_models_in_float64(checkpoint, tmp_path):
    given = feed()
    tallies = blocks(checkpoint, tmp_path, given)
    full = log_probabilities(checkpoint)
    for scheme in parse_schemes([SCHEMES]):
        stored = evidence(given, tallies)[scheme.spec].fidelity
        for k, ((p_TV, targets_T), (q_TV, _)) in filled(
            enumerate(zip(full, log_probabilities(checkpoint, scheme), strict=True))
        ):
            kl_T = (np.exp(p_TV) * (p_TV - q_TV)).sum(1)
            rows = np.arange(len(targets_T))
            dp_T = np.exp(q_TV[rows, targets_T]) - np.exp(p_TV[rows, targets_T])
            # The model itself is computed in float32 by other sums: logits differ by about 1e-6
            # of their size, a divergence by as much of its square root.
            np.testing.assert_allclose(stored.kl_sum[k], kl_T.sum(), rtol=1e-3, atol=1e-9)
            np.testing.assert_allclose(stored.kl_max[k], kl_T.max(), rtol=1e-3, atol=1e-9)
            np.testing.assert_allclose(stored.squared_dp_sum[k], (dp_T**2).sum(), rtol=1e-3)
            # A tie, or a difference that rounding turns, may move one token.
            same = int((p_TV.argmax(1) == q_TV.argmax(1)).sum())
            assert abs(int(stored.same_top[k]) - same) <= 1
            assert int(stored.kl_counts[k].sum()) == len(targets_T)


def sharpened(folder, target):
    """Return a copy of a model that is sure of some tokens, whose head is larger."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"] *= 32.0
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@on_llama
def test_sums_by_confidence_are_those_of_whole_models_in_float64(checkpoint, tmp_path):
    given, folder = feed(), sharpened(checkpoint, tmp_path / "sharp")
    tallies = blocks(folder, tmp_path, given)
    full, reached = log_probabilities(folder), np.zeros(4, dtype=int)
    for scheme in parse_schemes([SCHEMES]):
        stored = evidence(given, tallies)[scheme.spec].fidelity.by_confidence
        for k, ((p_TV, _), (q_TV, _)) in enumerate(
            zip(full, log_probabilities(folder, scheme), strict=True)
        ):
            top_T = np.exp(p_TV.max(1))
            kl_T = (np.exp(p_TV) * (p_TV - q_TV)).sum(1)
            flip_T = p_TV.argmax(1) != q_TV.argmax(1)
            edges = (0.0, 0.25, 0.5, 0.9, 1.1)
            for bucket in range(4):
                inside = (edges[bucket] <= top_T) & (top_T < edges[bucket + 1])
                assert stored.tokens[k, bucket] == inside.sum()
                np.testing.assert_allclose(
                    stored.kl_sum[k, bucket], kl_T[inside].sum(), rtol=2e-3, atol=1e-6
                )
                assert abs(stored.flips[k, bucket] - (flip_T & inside).sum()) <= 1
        reached += stored.tokens.sum(0)
        assert stored.flips[:, 2:].sum() > 0 or scheme.bits == 4
    assert (reached > 0).all()


def in_conversations() -> Corpus:
    """Return the same windows with a role for each token, some of them not scored."""
    random = np.random.default_rng(3)
    windows = (
        replace(w, roles=random.integers(UNSCORED, len(ROLES), len(w.tokens)).astype(np.int8))
        for w in EVALUATION
    )
    return replace(CORPUS, evaluation=tuple(windows))


@on_llama
def test_sums_by_role_are_those_of_whole_models_in_float64(checkpoint, tmp_path):
    corpus = in_conversations()
    given = replace(feed(), evaluation=make_batches(corpus.evaluation, CONTEXT, 160))
    tallies = blocks(checkpoint, tmp_path, given)
    (scheme, _) = parse_schemes([SCHEMES])
    stored = evidence_of(corpus, given, tallies[scheme.spec], tallies[FULL_PRECISION])
    whole = zip(log_probabilities(checkpoint), log_probabilities(checkpoint, scheme), strict=True)
    for k, ((p_TV, targets_T), (q_TV, _)) in filled(enumerate(whole)):
        kl_T = (np.exp(p_TV) * (p_TV - q_TV)).sum(1)
        nll_T = -q_TV[np.arange(len(targets_T)), targets_T]
        roles_T = corpus.evaluation[k].roles[1:]
        for role, _ in enumerate(ROLES):
            inside = roles_T == role
            assert stored.roles.tokens[k, role] == inside.sum()
            np.testing.assert_allclose(
                stored.roles.nll_sum[k, role], nll_T[inside].sum(), rtol=1e-4
            )
            np.testing.assert_allclose(
                stored.roles.kl_sum[k, role], kl_T[inside].sum(), rtol=1e-3, atol=1e-9
            )
        scored = roles_T != UNSCORED
        assert stored.tokens[k] == scored.sum() == corpus.evaluation[k].scored
        np.testing.assert_allclose(stored.nll_sum[k], nll_T[scored].sum(), rtol=1e-4)
        np.testing.assert_allclose(stored.fidelity.kl_sum[k], kl_T[scored].sum(), rtol=1e-3)


@torch.no_grad()
def last_outputs(folder, scheme=None):
    """Return what the last block returns for every scored token's row, window by window."""
    model, found = plain_model(folder, scheme), []
    model.model.layers[-1].register_forward_hook(
        lambda _, args, out: found.append((out[0] if isinstance(out, tuple) else out).double())
    )
    for window in EVALUATION:
        model(input_ids=torch.as_tensor(window.tokens)[None])
    return [h.reshape(-1, h.shape[-1])[:-1] for h in found]


def test_the_error_of_the_last_block_s_output_is_that_of_whole_models(checkpoint, tmp_path):
    given = feed()
    stored = evidence(given, blocks(checkpoint, tmp_path, given))
    assert stored[FULL_PRECISION].output_error is None
    for scheme in parse_schemes([SCHEMES]):
        pairs = zip(last_outputs(checkpoint), last_outputs(checkpoint, scheme), strict=True)
        expected = [
            float(((q - p).square().sum(1) / p.square().sum(1))[w.scored_from - 1 :].sum())
            for (p, q), w in zip(pairs, EVALUATION, strict=True)
        ]
        # Two float32 computations of states of size 1: differences of 1e-7 beside errors of 1e-2.
        np.testing.assert_allclose(stored[scheme.spec].output_error, expected, rtol=1e-4)


@on_llama
def test_losses_do_not_depend_on_the_comparison(checkpoint, tmp_path):
    given = feed()
    alone = Feed(given.calibration, given.evaluation, compared=False)
    compared = blocks(checkpoint, tmp_path / "a", given)
    for spec, tally in filled(blocks(checkpoint, tmp_path / "b", alone).items()):
        assert tally.kl == []
        for nll, same in filled(zip(tally.nll, compared[spec].nll, strict=True)):
            assert torch.equal(nll, same)


def test_full_precision_runs_for_the_comparison_where_it_is_measured_already(checkpoint, tmp_path):
    given = feed()
    later = Feed(given.calibration, given.evaluation, full_precision=False)
    whole, rest = blocks(checkpoint, tmp_path / "a", given), blocks(checkpoint, tmp_path, later)
    for spec, tally in filled(rest.items()):
        assert all(torch.equal(a, b) for a, b in zip(tally.kl, whole[spec].kl, strict=True))


def test_sums_by_position_add_up_to_those_of_documents(checkpoint, tmp_path):
    given = feed()
    for stored in filled(evidence(given, blocks(checkpoint, tmp_path, given)).values()):
        places = stored.positions
        assert places.edges.tolist() == [0, 16, CONTEXT]
        assert (places.tokens.sum(1) == stored.tokens).all()
        np.testing.assert_allclose(places.nll_sum.sum(1), stored.nll_sum)
        expected = [[min(len(w.tokens), 16) - 1, max(len(w.tokens) - 16, 0)] for w in EVALUATION]
        assert places.tokens.tolist() == expected
        if stored.fidelity is not None:
            np.testing.assert_allclose(places.kl_sum.sum(1), stored.fidelity.kl_sum)


@pytest.mark.parametrize(
    ("context", "edges"),
    [(1, [0, 1]), (16, [0, 16]), (17, [0, 16, 17]), (2048, [0, 16, 64, 256, 1024, 2048])],
)
def test_bins_of_positions_grow_fourfold_up_to_the_context(context, edges):
    assert position_edges(context).tolist() == edges


def test_streams_share_the_seconds_of_what_they_do_together(monkeypatch):
    clock = iter([1.0, 4.0])
    monkeypatch.setattr("qaudit.engine.tally.time.perf_counter", lambda: next(clock))
    tallies = Tally(), Tally()
    with timed(CPU, *tallies):
        pass
    assert [tally.seconds for tally in tallies] == [1.5, 1.5]


@on_llama
def test_streams_share_the_rows_of_logits_that_are_in_memory(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("qaudit.model.blocks.head_rows", lambda *_: 16)
    counts, logits = [], BlockModel.logits

    def counted(model, hidden_BTD):
        counts.append(hidden_BTD.shape[1])
        return logits(model, hidden_BTD)

    monkeypatch.setattr(BlockModel, "logits", counted)
    blocks(checkpoint, tmp_path, feed())
    assert max(counts) == 15  # five rows of each of three streams


def test_another_vocabulary_is_not_compared_and_the_note_names_both():
    tally, targets_N = Tally(), torch.tensor([1, 0])
    reference = Reference.of(torch.randn(2, 8), targets_N)
    logits_NV = torch.randn(2, 9)
    rows = rows_of(tally, reference, logits_NV, targets_N)
    assert rows.kl_N is None
    torch.testing.assert_close(
        rows.nll_N, torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="none")
    )
    (note,) = tally.notes
    assert note.endswith("its vocabulary is 9 tokens, that of full precision 8")


def test_logits_that_are_not_finite_leave_the_others_as_they_are(checkpoint, tmp_path):
    given = feed()
    tallies = blocks(checkpoint, tmp_path, given)
    broken, sound = list(tallies)[1:]
    before = evidence(given, tallies)[sound]
    tallies[broken].kl[0][0, 3] = float("nan")
    after = evidence(given, tallies)
    assert after[broken].fidelity is None
    assert after[broken].positions.kl_sum is None
    assert f"at 1 of {int(before.tokens.sum())} tokens" in tallies[broken].notes[-1]
    np.testing.assert_array_equal(after[sound].fidelity.kl_sum, before.fidelity.kl_sum)
