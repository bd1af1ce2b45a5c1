"""Rollouts in the pass: sums against plain logits, divergence against real generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from qaudit.core.fidelity import CHOSEN, TIE, ComparedRows, losses
from qaudit.core.fidelity import log_probabilities as log_probabilities_under
from qaudit.core.registry import parse_schemes
from qaudit.engine.batches import make_batches, make_rollout_batches
from qaudit.engine.read_out import evidence_of
from qaudit.engine.tokens import Feed
from qaudit.types import (
    FULL_PRECISION,
    ROLES,
    UNSCORED,
    Corpus,
    EvaluationDocument,
    Protocol,
    RolloutChoices,
    RolloutText,
    Window,
)
from tests.support.filled import filled
from tests.support.passes import CALIBRATION, CONTEXT, EVALUATION, opened, plain_model, tallies_of

WRITTEN, ENDS = 20, (("turn", (2, 17)), ("reasoning", (5,)))
READ, SAMPLER = 12, (0.8, 40, 0.95)
(SCHEME,) = parse_schemes(["rtn-3bit:group=32"])


def prompts():
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 250, (6, 9), generator=generator)


def generated(model, *, sampled=False):
    """Return prompts with what the model writes behind them; it never ends."""
    torch.manual_seed(5)
    prompts_BT = prompts()
    model.generation_config.eos_token_id = None
    written: torch.Tensor = model.generate(
        prompts_BT,
        attention_mask=torch.ones_like(prompts_BT),
        max_new_tokens=WRITTEN,
        do_sample=sampled,
        pad_token_id=0,
    )
    return written


@dataclass(frozen=True)
class Scored:
    """Rollouts, and what the engine makes of them."""

    rows: torch.Tensor  # greedy ones first
    evidence: dict[str, Any]


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
    documents = tuple(EvaluationDocument(f"d{k}", f"{k}" * 64, 40) for k in range(len(EVALUATION)))
    protocol = Protocol(CONTEXT, CONTEXT)
    return Corpus(protocol, (), tuple(EVALUATION), documents, rollouts=rollouts)


@pytest.fixture(scope="module")
def scored(checkpoint, once):
    return once(score, checkpoint)


def score(spill, checkpoint):
    """Generate rollouts, and read them out in a pass."""
    model = plain_model(checkpoint)
    rows_BT = torch.cat([generated(model), generated(model, sampled=True)])
    corpus = corpus_of(rows_BT)
    documents = make_batches(EVALUATION, CONTEXT, 160)
    given = Feed(make_batches(CALIBRATION, CONTEXT, 160), documents)
    given = replace(given, evaluation=(*documents, *make_rollout_batches(corpus)))
    tallies = tallies_of(checkpoint, [SCHEME], spill, given)
    full = tallies[FULL_PRECISION]
    evidence = {s: evidence_of(corpus, given, tally, full) for s, tally in tallies.items()}
    return Scored(rows_BT, evidence)


@torch.no_grad()
def log_probabilities(model, rows_BT):
    logits: torch.Tensor = model(rows_BT).logits[:, 8:-1].double()
    return logits.log_softmax(-1)


def test_sums_of_samples_are_those_of_plain_logits(checkpoint, scored):
    rollouts = scored.evidence[SCHEME.spec].rollouts
    p_STV = log_probabilities(plain_model(checkpoint), scored.rows)
    q_STV = log_probabilities(plain_model(checkpoint, SCHEME), scored.rows)
    kl_S = (p_STV.exp() * (p_STV - q_STV)).sum(-1).sum(-1)
    nll_S = -q_STV.gather(-1, scored.rows[:, 9:, None]).sum((1, 2))
    np.testing.assert_allclose(rollouts.kl_sum, kl_S, rtol=1e-3)
    np.testing.assert_allclose(rollouts.nll_sum, nll_S, rtol=1e-4)
    assert rollouts.end_names == ("turn", "reasoning")
    for g, (_, ids) in enumerate(ENDS):
        ends_S = q_STV[..., list(ids)].exp().sum((1, 2))
        np.testing.assert_allclose(rollouts.end_sum[:, g], ends_S, rtol=1e-4)
    assert rollouts.tokens.tolist() == [WRITTEN] * len(scored.rows)


def test_ends_by_role_and_position_are_those_of_plain_logits(checkpoint, scored):
    rollouts = scored.evidence[SCHEME.spec].rollouts
    q_STV = log_probabilities(plain_model(checkpoint, SCHEME), scored.rows)
    nll_ST = -q_STV.gather(-1, scored.rows[:, 9:, None])[..., 0]
    ends_STG = torch.stack([q_STV[..., list(ids)].exp().sum(-1) for _, ids in ENDS], -1)
    in_role = [torch.tensor(roles_of_row(k)[9:].astype(int)) for k in range(len(scored.rows))]
    assert rollouts.positions.edges.tolist() == [0, 16, 20]
    place = torch.arange(WRITTEN).expand(len(in_role), WRITTEN) // 16
    for part, bin_ST in ((rollouts.roles, torch.stack(in_role)), (rollouts.positions, place)):
        for b in range(part.tokens.shape[1]):
            inside_ST = bin_ST == b
            assert part.tokens[:, b].tolist() == inside_ST.sum(1).tolist()
            nll_S = (nll_ST * inside_ST).sum(1)
            np.testing.assert_allclose(part.nll_sum[:, b], nll_S, rtol=1e-4)
            ends_SG = (ends_STG * inside_ST[..., None]).sum(1)
            np.testing.assert_allclose(part.end_sum[:, b], ends_SG, rtol=1e-4)


def test_what_was_drawn_has_its_probability_under_the_sampler(checkpoint, scored):
    targets = scored.rows[:, 9:, None]
    for spec, model in (
        (SCHEME.spec, plain_model(checkpoint, SCHEME)),
        ("fp", plain_model(checkpoint)),
    ):
        rollouts = scored.evidence[spec].rollouts
        with torch.no_grad():
            logits = model(scored.rows).logits[:, 8:-1].double()
        log_STV = log_probabilities_under(logits.flatten(0, 1), *SAMPLER).view_as(logits)
        wanted_S = log_STV.gather(-1, targets)[:, :READ, 0].sum(1)
        sampled_S = (
            np.arange(len(scored.rows)) >= len(scored.rows) // 2
        )  # greedy ones have no weight
        wanted_S = wanted_S[sampled_S]
        drawn_S = rollouts.drawn_sum[sampled_S]
        ruled_out = torch.isneginf(wanted_S).numpy()
        if spec == "fp":  # what it is said to have written was written, at the edge too
            assert np.isfinite(drawn_S).all()
            assert ruled_out.any()
        else:
            assert np.isneginf(drawn_S[ruled_out]).all()
        kept = ~ruled_out
        np.testing.assert_allclose(drawn_S[kept], wanted_S[kept], rtol=1e-3)


def test_full_precision_has_the_entropy_of_what_it_drew_from(checkpoint, scored):
    rollouts, half = scored.evidence[FULL_PRECISION].rollouts, len(scored.rows) // 2
    with torch.no_grad():
        logits = plain_model(checkpoint)(scored.rows).logits[:, 8:-1].double()
    log_NV = log_probabilities_under(logits.flatten(0, 1), *SAMPLER)
    entropy_ST = torch.distributions.Categorical(logits=log_NV).entropy().view(len(logits), -1)
    wanted_S = entropy_ST[half:, :READ].sum(1)
    np.testing.assert_allclose(rollouts.entropy_sum[half:], wanted_S, rtol=1e-4)
    quantized = scored.evidence[SCHEME.spec].rollouts
    assert quantized.entropy_sum is None


def test_greedy_divergence_is_that_of_real_generation(checkpoint, scored):
    rollouts = scored.evidence[SCHEME.spec].rollouts
    greedy_BT = scored.rows[: len(scored.rows) // 2]
    own_BT = generated(plain_model(checkpoint, SCHEME))
    agreed_B = (own_BT == greedy_BT)[:, 9:].long().cumprod(1).sum(1)
    assert rollouts.agreed[: len(greedy_BT)].tolist() == agreed_B.tolist()
    assert int(agreed_B.min()) < WRITTEN  # they do differ


def test_full_precision_never_leaves_its_own_greedy_rollouts(scored):
    rollouts = scored.evidence[FULL_PRECISION].rollouts
    half = len(scored.rows) // 2
    assert rollouts.agreed.tolist() == [WRITTEN] * half + [-1] * half
    assert rollouts.kl_sum is None


def test_documents_are_measured_as_without_rollouts(checkpoint, scored, tmp_path):
    corpus = replace(corpus_of(scored.rows), rollouts=None)
    given = Feed(make_batches(CALIBRATION, CONTEXT, 160), make_batches(EVALUATION, CONTEXT, 160))
    tallies = tallies_of(checkpoint, [SCHEME], tmp_path, given)
    for spec, tally in filled(tallies.items()):
        alone = evidence_of(corpus, given, tally, tallies[FULL_PRECISION])
        beside = scored.evidence[spec]
        np.testing.assert_array_equal(alone.nll_sum, beside.nll_sum)
        np.testing.assert_array_equal(alone.tokens, beside.tokens)
        if alone.fidelity is not None:
            np.testing.assert_array_equal(alone.fidelity.kl_sum, beside.fidelity.kl_sum)
        assert alone.rollouts is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rollouts_in_other_batches_are_scored_alike(checkpoint, tmp_path, dtype):
    """Generation with a cache, and batches of other sizes, widths and orders round otherwise."""
    model = plain_model(checkpoint).to(dtype)
    rows_BT = torch.cat([generated(model), generated(model, sampled=True)])
    corpus, scored = corpus_of(rows_BT), []
    for k, tokens in enumerate((4096, 70)):
        batches = [*make_batches(EVALUATION, CONTEXT, 160), *make_rollout_batches(corpus, tokens)]
        given = Feed(make_batches(CALIBRATION, CONTEXT, 160), tuple(map((same, wider)[k], batches)))
        tallies = tallies_of(opened(checkpoint, dtype), [SCHEME], tmp_path / str(k), given)
        full = tallies[FULL_PRECISION]
        scored.append({s: evidence_of(corpus, given, t, full).rollouts for s, t in tallies.items()})
    rounding = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for stream in filled(scored[0]):
        first, second = (each[stream] for each in scored)
        np.testing.assert_allclose(first.nll_sum, second.nll_sum, rtol=rounding)
        if dtype == torch.float32:
            assert first.agreed.tolist() == second.agreed.tolist()
        if stream == FULL_PRECISION:
            half = len(rows_BT) // 2
            assert first.agreed.tolist() == second.agreed.tolist() == [WRITTEN] * half + [-1] * half


def same(batch):
    return batch


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
