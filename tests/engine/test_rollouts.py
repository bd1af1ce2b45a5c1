"""Rollouts in the pass: sums against plain logits, divergence against real generation."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qaudit.core.fidelity import CHOSEN, TIE, ComparedRows, losses
from qaudit.core.fidelity import log_probabilities as log_probabilities_under
from qaudit.core.registry import parse_schemes
from qaudit.engine.batches import make_rollout_batches
from qaudit.engine.read_out import evidence_of
from qaudit.types import FULL_PRECISION, ROLES, UNSCORED, RolloutChoices, RolloutText, Window
from tests.support import passes
from tests.support.filled import filled
from tests.support.passes import CORPUS, feed, opened, plain_model, tallies_of

WRITTEN, ENDS = 20, (("turn", (2, 17)), ("reasoning", (5,)))
READ, SAMPLER = 12, (0.8, 40, 0.95)
(SCHEME,) = parse_schemes(["rtn-3bit:group=32"])


@pytest.fixture(scope="module")
def checkpoint(once):
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
def scored(checkpoint, once):
    return once(score, checkpoint)


def score(spill, checkpoint):
    """Generate rollouts, and read them out in a pass."""
    rows_BT = written_by(plain_model(checkpoint))
    evidence = evidence_in(spill, checkpoint, corpus_of(rows_BT))
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
def logits_of(checkpoint, rows_BT, scheme=None):
    return plain_model(checkpoint, scheme)(rows_BT).logits[:, 8:-1].double()


def test_sums_of_samples_are_those_of_plain_logits_by_role_and_position_too(checkpoint, scored):
    rollouts = scored.evidence[SCHEME.spec].rollouts
    p_STV, q_STV = (
        logits_of(checkpoint, scored.rows, scheme).log_softmax(-1) for scheme in (None, SCHEME)
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


def test_what_was_drawn_has_its_probability_and_entropy_under_the_sampler(checkpoint, scored):
    half = len(scored.rows) // 2  # greedy ones have no weight
    for spec, scheme in ((SCHEME.spec, SCHEME), (FULL_PRECISION, None)):
        rollouts = scored.evidence[spec].rollouts
        logits = logits_of(checkpoint, scored.rows[half:], scheme)
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


def test_greedy_divergence_is_that_of_real_generation(checkpoint, scored):
    half = len(scored.rows) // 2
    quantized_BT = generated(plain_model(checkpoint, SCHEME))
    agreed_B = (quantized_BT == scored.rows[:half])[:, 9:].long().cumprod(1).sum(1)
    assert scored.evidence[SCHEME.spec].rollouts.agreed[:half].tolist() == agreed_B.tolist()
    assert int(agreed_B.min()) < WRITTEN  # they do differ
    full = scored.evidence[FULL_PRECISION].rollouts  # it never leaves its own
    assert (full.agreed.tolist(), full.kl_sum) == ([WRITTEN] * half + [-1] * half, None)


def test_documents_are_measured_as_without_rollouts(checkpoint, scored, tmp_path):
    corpus = replace(corpus_of(scored.rows), rollouts=None)
    for spec, alone in filled(evidence_in(tmp_path, checkpoint, corpus).items()):
        beside = scored.evidence[spec]
        np.testing.assert_array_equal(alone.nll_sum, beside.nll_sum)
        np.testing.assert_array_equal(alone.tokens, beside.tokens)
        if alone.fidelity is not None:
            np.testing.assert_array_equal(alone.fidelity.kl_sum, beside.fidelity.kl_sum)
        assert alone.rollouts is None


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_rollouts_in_other_batches_are_scored_alike(checkpoint, tmp_path, dtype, rounding):
    """Generation with a cache, and batches of other sizes, widths and orders round otherwise."""
    rows_BT = written_by(plain_model(checkpoint).to(dtype))
    corpus, model, half = corpus_of(rows_BT), opened(checkpoint, dtype), len(rows_BT) // 2
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
