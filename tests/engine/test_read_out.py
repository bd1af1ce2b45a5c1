"""Losses, divergence and agreement of every stream, held against whole models in float64.

Of rollouts too: sums against plain logits, divergence against real generation.
"""

import shutil
from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qaudit.core.fidelity import CHOSEN, TIE, ComparedRows, Reference, head_rows, losses
from qaudit.core.fidelity import log_probabilities as log_probabilities_under
from qaudit.core.registry import parse_schemes
from qaudit.engine.batches import make_batches, make_rollout_batches
from qaudit.engine.read_out import evidence_of, position_edges, rows_of
from qaudit.engine.tally import Tally, timed
from qaudit.engine.tokens import Feed
from qaudit.model.blocks import BlockModel
from qaudit.types import FULL_PRECISION, ROLES, UNSCORED, RolloutChoices, RolloutText, Window
from tests.support import passes
from tests.support.filled import filled
from tests.support.passes import (
    CONTEXT,
    CORPUS,
    CPU,
    EVALUATION,
    feed,
    on_llama,
    opened,
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
def test_streams_do_not_depend_on_others_read_out(checkpoint, tallies, tmp_path, monkeypatch):
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


# ----------------------------------------------------------------------------------------- rollouts

WRITTEN, ENDS = 20, (("turn", (2, 17)), ("reasoning", (5,)))
READ, SAMPLER = 12, (0.8, 40, 0.95)
(SCHEME,) = parse_schemes(["rtn-3bit:group=32"])


@pytest.fixture(scope="module")
def llama(once):
    return once(passes.save, "llama")


def generated(model, *, sampled=False):
    """Return prompts with what the model writes behind them; it never ends."""
    torch.manual_seed(5)
    prompts_BT = torch.randint(3, 250, (6, 9), generator=torch.Generator().manual_seed(3))
    model.generation_config.eos_token_id = None
    mask_BT = torch.ones_like(prompts_BT)
    more = {"max_new_tokens": WRITTEN, "do_sample": sampled, "pad_token_id": 0}
    return model.generate(prompts_BT, attention_mask=mask_BT, **more)


def roles_of_row(k):
    """Return roles of a rollout whose reasoning ends behind 5 tokens and its number."""
    roles = np.full(9 + WRITTEN, ROLES.index("answer"), dtype=np.int8)
    roles[:9], roles[9 : 14 + k] = UNSCORED, ROLES.index("reasoning")
    return roles


def corpus_of(rows_BT):
    windows = tuple(
        Window(k, r.numpy().astype(np.int32), 9, roles_of_row(k)) for k, r in enumerate(rows_BT)
    )
    half = len(rows_BT) // 2
    rollouts = RolloutText(
        windows,
        prompt=np.arange(len(rows_BT)) % half,
        greedy=np.arange(len(rows_BT)) < half,
        ends=ENDS,
        sha256="rollouts",
        mark=np.where(np.arange(len(rows_BT)) <= half, np.nan, 1.0),  # nor one that was drawn
        read=np.full(len(rows_BT), READ),
        sampler=SAMPLER,
    )
    return replace(CORPUS, rollouts=rollouts)


@pytest.fixture(scope="module")
def scored(llama, once):
    return once(score, llama)


def score(spill, llama):
    """Generate rollouts, and read them out in a pass."""
    rows_BT = written_by(plain_model(llama))
    evidence = evidence_in(spill, llama, corpus_of(rows_BT))
    return SimpleNamespace(rows=rows_BT, evidence=evidence)  # greedy ones first


def written_by(model):
    return torch.cat([generated(model), generated(model, sampled=True)])


def evidence_in(spill, model, corpus, tokens=4096, change=lambda batch: batch):
    rollouts = make_rollout_batches(corpus, tokens) if corpus.rollouts else ()
    given = replace(feed(), evaluation=tuple(map(change, (*feed().evaluation, *rollouts))))
    tallies = tallies_of(model, [SCHEME], spill, given)
    full = tallies[FULL_PRECISION]
    return {name: evidence_of(corpus, given, tally, full) for name, tally in tallies.items()}


@torch.no_grad()
def logits_of(llama, rows_BT, scheme=None):
    return plain_model(llama, scheme)(rows_BT).logits[:, 8:-1].double()


def test_sums_of_samples_are_those_of_plain_logits_by_role_and_position_too(llama, scored):
    rollouts = scored.evidence[SCHEME.spec].rollouts
    p_STV, q_STV = (
        logits_of(llama, scored.rows, scheme).log_softmax(-1) for scheme in (None, SCHEME)
    )
    kl_S = (p_STV.exp() * (p_STV - q_STV)).sum(-1).sum(-1)
    np.testing.assert_allclose(rollouts.kl_sum, kl_S, rtol=1e-3)
    nll_ST = -q_STV.gather(-1, scored.rows[:, 9:, None])[..., 0]
    ends_STG = torch.stack([q_STV[..., list(ids)].exp().sum(-1) for _, ids in ENDS], -1)
    np.testing.assert_allclose(rollouts.nll_sum, nll_ST.sum(1), rtol=1e-4)
    np.testing.assert_allclose(rollouts.end_sum, ends_STG.sum(1), rtol=1e-4)
    assert rollouts.end_names == ("turn", "reasoning")
    assert rollouts.tokens.tolist() == [WRITTEN] * len(scored.rows)
    in_role = [torch.tensor(roles_of_row(k)[9:].astype(int)) for k in range(len(scored.rows))]
    assert rollouts.positions.edges.tolist() == [0, 16, 20]
    place = torch.arange(WRITTEN).expand(len(in_role), WRITTEN) // 16
    for part, bin_ST in ((rollouts.roles, torch.stack(in_role)), (rollouts.positions, place)):
        for b in range(part.tokens.shape[1]):
            inside_ST = bin_ST == b
            assert part.tokens[:, b].tolist() == inside_ST.sum(1).tolist()
            np.testing.assert_allclose(part.nll_sum[:, b], (nll_ST * inside_ST).sum(1), rtol=1e-4)
            ends_SG = (ends_STG * inside_ST[..., None]).sum(1)
            np.testing.assert_allclose(part.end_sum[:, b], ends_SG, rtol=1e-4)


def test_what_was_drawn_has_its_probability_and_entropy_under_the_sampler(llama, scored):
    half = len(scored.rows) // 2  # greedy ones have no weight
    for spec, scheme in ((SCHEME.spec, SCHEME), (FULL_PRECISION, None)):
        rollouts = scored.evidence[spec].rollouts
        logits = logits_of(llama, scored.rows[half:], scheme)
        log_STV = log_probabilities_under(logits.flatten(0, 1), *SAMPLER).view_as(logits)
        wanted_S = log_STV.gather(-1, scored.rows[half:, 9:, None])[:, :READ, 0].sum(1)
        drawn_S, ruled_out = rollouts.drawn_sum[half:], torch.isneginf(wanted_S).numpy()
        if scheme is None:  # what it is said to have written was written, at the edge too
            assert np.isfinite(drawn_S).all()
            assert ruled_out.any()
            entropy_ST = torch.distributions.Categorical(logits=log_STV).entropy()
            entropy_S = entropy_ST[:, :READ].sum(1)
            np.testing.assert_allclose(rollouts.entropy_sum[half:], entropy_S, rtol=1e-4)
        else:
            assert np.isneginf(drawn_S[ruled_out]).all()
            assert rollouts.entropy_sum is None
        np.testing.assert_allclose(drawn_S[~ruled_out], wanted_S[~ruled_out], rtol=1e-3)


def test_greedy_divergence_is_that_of_real_generation(llama, scored):
    half = len(scored.rows) // 2
    quantized_BT = generated(plain_model(llama, SCHEME))
    agreed_B = (quantized_BT == scored.rows[:half])[:, 9:].long().cumprod(1).sum(1)
    assert scored.evidence[SCHEME.spec].rollouts.agreed[:half].tolist() == agreed_B.tolist()
    assert int(agreed_B.min()) < WRITTEN  # they do differ
    full = scored.evidence[FULL_PRECISION].rollouts  # it never leaves its own
    assert (full.agreed.tolist(), full.kl_sum) == ([WRITTEN] * half + [-1] * half, None)


def test_documents_are_measured_as_without_rollouts(llama, scored, tmp_path):
    corpus = replace(corpus_of(scored.rows), rollouts=None)
    for spec, alone in filled(evidence_in(tmp_path, llama, corpus).items()):
        beside = scored.evidence[spec]
        np.testing.assert_array_equal(alone.nll_sum, beside.nll_sum)
        np.testing.assert_array_equal(alone.tokens, beside.tokens)
        if alone.fidelity is not None:
            np.testing.assert_array_equal(alone.fidelity.kl_sum, beside.fidelity.kl_sum)
        assert alone.rollouts is None


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_rollouts_in_other_batches_are_scored_alike(llama, tmp_path, dtype, rounding):
    """Generation with a cache, and batches of other sizes, widths and orders round otherwise."""
    rows_BT = written_by(plain_model(llama).to(dtype))
    corpus, model, half = corpus_of(rows_BT), opened(llama, dtype), len(rows_BT) // 2
    plain = evidence_in(tmp_path, model, corpus)
    other = evidence_in(tmp_path, model, corpus, 70, wider)
    for stream in filled(plain):
        first, second = plain[stream].rollouts, other[stream].rollouts
        np.testing.assert_allclose(first.nll_sum, second.nll_sum, rtol=rounding)
        if dtype == torch.float32 or stream == FULL_PRECISION:
            assert first.agreed.tolist() == second.agreed.tolist()
        if stream == FULL_PRECISION:
            assert first.agreed.tolist() == [WRITTEN] * half + [-1] * half


def wider(batch):
    """Return a batch with more padding."""
    pad = torch.nn.functional.pad
    drawn_BT = None if batch.drawn_BT is None else pad(batch.drawn_BT, (0, 5))
    roles_BT = None if batch.roles_BT is None else pad(batch.roles_BT, (0, 5), value=UNSCORED)
    tokens_BT = pad(batch.tokens_BT, (0, 5))
    return replace(batch, tokens_BT=tokens_BT, drawn_BT=drawn_BT, roles_BT=roles_BT)


@pytest.mark.parametrize(
    ("gap", "expected"), [(0.0, CHOSEN), (0.0625, TIE), (0.125, TIE), (0.25, 0)]
)
def test_what_full_precision_wrote_may_be_below_its_likeliest_by_rounding(gap, expected):
    logits = torch.tensor([[10.0, 10.0 - gap, 1.0]], dtype=torch.bfloat16)
    target, none = torch.tensor([1]), torch.zeros(0, dtype=torch.long)
    rows = ComparedRows(losses(logits, target))
    for wrote in (True, False):
        choices = RolloutChoices(((2,),))
        found = rows.with_choices(logits, target, choices, none, wrote=wrote).likeliest_N
        assert found.tolist() == [expected if wrote else int(expected == CHOSEN)]
