"""The same weights through other batches: what moves, and how often a rule would say they changed.

    python -m benchmarks.geometry [--prompts 32] [--cases 400]

The demo's last checkpoint writes one greedy rollout and four drawn ones behind each prompt, by
transformers, with its cache. They are scored beside documents twice: in batches of 4,096 tokens,
and in five other ways: smaller ones, in another order, with more padding. What the first says of a
stream is then compared with what each of the others says of it, as if those were two models: in
`--cases` random halves of the prompts and of the documents, how often the interval of the change
excludes a margin of 1e-6. A changed number of tokens to divergence counts as one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from qaudit.checkpoints.folder import shipped_series
from qaudit.checkpoints.safetensors import WeightFolder
from qaudit.core import statistics
from qaudit.core.items import expected_score
from qaudit.core.registry import parse_schemes
from qaudit.engine.batches import Batch, make_batches, make_rollout_batches
from qaudit.engine.block_pass import run_blocks
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.read_out import evidence_of
from qaudit.engine.tokens import Feed
from qaudit.judge.tasks import places_of_divergence
from qaudit.model.blocks import BlockModel
from qaudit.rollouts.folder import DrawSettings, DueSample, Prompt
from qaudit.rollouts.generate import generate
from qaudit.text.documents import python_part
from qaudit.text.rollouts import Sampler
from qaudit.types import (
    FULL_PRECISION,
    Corpus,
    EvaluationDocument,
    Evidence,
    Interval,
    Protocol,
    RolloutEvidence,
    RolloutText,
    Window,
)

Ints = npt.NDArray[np.int64]

CPU = torch.device("cpu")
MARGIN = 1e-6  # of an added loss, nats, a score; sums in float32 are right to a tenth of it
CONTEXT, PROMPT, WRITTEN, SAMPLES = 256, 24, 64, 8
GEOMETRIES = ((600, 37), (300, 11), (1100, 5), (2000, 64), (4096, 50))
"""Tokens of a batch, and how many columns of padding are added to it."""

SCHEMES = ("rtn-4bit:group=32", "rtn-3bit:group=32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--cases", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    place = shipped_series() / "stage2-ingredient3-step1000"
    for dtype in ("float32", "bfloat16"):
        corpus = written(place, dtype, options.prompts)
        first = scored(place, dtype, corpus)
        others = [scored(place, dtype, turned(corpus), *how) for how in GEOMETRIES]
        print(f"\n{dtype}, {options.prompts} prompts and documents")
        for stream, a in first.items():
            print(f"    {stream.partition(':group')[0]}")
            again = [turned_back(other[stream]) for other in others]
            for name, largest in moved(a, again).items():
                print(f"        {name:<29}{largest:8.1e}")
            breaches = [case for b in again for case in cases(a, b, options.cases // len(again))]
            for name in breaches[0]:
                share = np.mean([case[name] for case in breaches])
                print(f"        {name + ': changed':<29}{share:8.1%}")


def written(place: Path, dtype: str, count: int) -> Corpus:
    """Return documents, and what the model writes behind their beginnings."""
    read = PreTrainedTokenizerFast.from_pretrained(place)
    texts = [document.text for document in python_part("evaluation")]
    rows = [np.array(read.encode(text)[:CONTEXT], np.int32) for text in texts]
    rows = [row for row in rows if len(row) > 2 * PROMPT][:count]
    number = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=number).eval()
    settings = DrawSettings(Sampler(temperature=0.8, top_p=0.95), 0, WRITTEN, ())
    samples = []
    for k, row in enumerate(rows):
        prompt = Prompt(k, str(k), tuple(map(int, row[:PROMPT])))
        due = [DueSample(prompt, 0, greedy=True)]
        due += [DueSample(prompt, n, greedy=False) for n in range(SAMPLES)]
        samples += generate(model, due, settings)
    greedy = np.array([sample.greedy for sample in samples])
    # A mark that scatters between samples: whether the last token is an even one.
    marks = np.array([float(sample.new_ids[-1] % 2 == 0) for sample in samples])
    text = RolloutText(
        tuple(
            Window(k, np.array((*s.ids, *s.new_ids), np.int32), PROMPT)
            for k, s in enumerate(samples)
        ),
        prompt=np.array([sample.prompt for sample in samples]),
        greedy=greedy,
        ends=(("turn", (0,)),),
        sha256="",
        mark=np.where(greedy, np.nan, marks),
        read=np.full(len(samples), WRITTEN),
        sampler=(0.8, None, 0.95),
    )
    windows = tuple(Window(k, row) for k, row in enumerate(rows))
    named = tuple(EvaluationDocument(str(k), str(k), CONTEXT) for k in range(len(rows)))
    return Corpus(Protocol(CONTEXT, CONTEXT), (), windows, named, rollouts=text)


def turned(corpus: Corpus) -> Corpus:
    """Return a corpus whose documents and samples are in the reverse order."""
    text = corpus.rollouts
    assert text is not None
    assert text.mark is not None
    backward = replace(
        text,
        windows=text.windows[::-1],
        prompt=text.prompt[::-1].copy(),
        greedy=text.greedy[::-1].copy(),
        mark=text.mark[::-1].copy(),
    )
    last = len(corpus.evaluation) - 1
    windows = tuple(replace(w, document=last - w.document) for w in corpus.evaluation[::-1])
    return replace(corpus, evaluation=windows, rollouts=backward)


def turned_back(evidence: Evidence) -> Evidence:
    """Return what was measured of a turned corpus, in the order of the other."""
    rollouts, fidelity = evidence.rollouts, evidence.fidelity
    assert rollouts is not None
    names = ("prompt", "tokens", "nll_sum", "agreed", "end_sum", "kl_sum", "mark", "drawn_sum")
    values = {name: getattr(rollouts, name) for name in names}
    rollouts = replace(rollouts, **{n: v[::-1] for n, v in values.items() if v is not None})
    if fidelity is not None:
        fidelity = replace(fidelity, kl_sum=fidelity.kl_sum[::-1])
    nll, tokens = evidence.nll_sum[::-1], evidence.tokens[::-1]
    return replace(evidence, nll_sum=nll, tokens=tokens, fidelity=fidelity, rollouts=rollouts)


def scored(
    place: Path, dtype: str, corpus: Corpus, tokens_per_batch: int = 4096, wider: int = 0
) -> dict[str, Evidence]:
    """Return what each stream makes of a corpus in batches of so many tokens."""
    batches = (
        *make_batches(corpus.evaluation, CONTEXT, tokens_per_batch),
        *make_rollout_batches(corpus, tokens_per_batch),
    )
    feed = Feed((), batches if wider == 0 else tuple(widened(batch, wider) for batch in batches))
    number = getattr(torch, dtype)
    with TemporaryDirectory() as spill, HiddenStates(Path(spill), 2**33, CPU) as states:
        model = BlockModel(place, WeightFolder(place), dtype=number, device=CPU)
        tallies = run_blocks(model, feed, parse_schemes(SCHEMES), states)
    full = tallies[FULL_PRECISION]
    return {name: evidence_of(corpus, feed, tally, full) for name, tally in tallies.items()}


def widened(batch: Batch, columns: int) -> Batch:
    """Return a batch with more padding."""
    drawn_BT = batch.drawn_BT
    return replace(
        batch,
        tokens_BT=pad(batch.tokens_BT, (0, columns)),
        drawn_BT=None if drawn_BT is None else pad(drawn_BT, (0, columns)),
    )


def moved(a: Evidence, others: Sequence[Evidence]) -> dict[str, float]:
    """Return by how much sums of documents and samples move at most."""
    parts: dict[str, list[float]] = {}
    first = a.rollouts
    for other in others:
        second = other.rollouts
        assert first is not None
        assert second is not None
        assert first.drawn_sum is not None
        assert second.drawn_sum is not None
        drawn = np.isfinite(first.drawn_sum) & np.isfinite(second.drawn_sum)
        weights = second.drawn_sum[drawn] - first.drawn_sum[drawn]
        found = {
            "loss of a document": other.nll_sum / a.nll_sum - 1,
            "loss of a rollout": second.nll_sum / first.nll_sum - 1,
            "logarithm of a weight": weights,
            "places of divergence": [(first.agreed != second.agreed).sum()],
            "rollouts that are left": [(second.agreed < second.tokens)[second.agreed >= 0].sum()],
        }
        if first.kl_sum is not None and second.kl_sum is not None:
            found["KL of a rollout"] = second.kl_sum / first.kl_sum - 1
        for name, values in found.items():
            parts.setdefault(name, []).append(float(np.abs(values).max()))
    return {name: max(values) for name, values in parts.items()}


def cases(a: Evidence, b: Evidence, count: int) -> Iterator[dict[str, bool]]:
    """Yield, for random halves of documents and prompts, which rules say that `b` is changed."""
    first, second = a.rollouts, b.rollouts
    assert first is not None
    assert second is not None
    prompts = np.unique(first.prompt)
    draw = np.random.default_rng(0)
    for _ in range(count):
        documents = draw.choice(len(a.nll_sum), len(a.nll_sum) // 2, replace=False)
        some = draw.choice(prompts, len(prompts) // 2, replace=False)
        found = {
            "added loss": excludes(
                statistics.relative_error(b.nll_sum[documents], a.nll_sum[documents])
            )
        }
        if a.fidelity is not None and b.fidelity is not None:
            kl = a.fidelity.kl_sum, b.fidelity.kl_sum
            sums = (kl[1][documents], kl[0][documents], a.tokens[documents])
            found["KL"] = excludes(statistics.interval(sums, statistics.change))
        yield found | of_rollouts(first, second, np.isin(first.prompt, some))


def of_rollouts(
    first: RolloutEvidence, second: RolloutEvidence, used: npt.NDArray[np.bool_]
) -> dict[str, bool]:
    """Return which rules of rollouts say that the second is changed."""
    places = [places_of_divergence(part) for part in (first, second)]
    prompts = np.unique(first.prompt[used])
    medians = [np.median(place[prompts]) for place in places]
    assert first.mark is not None
    assert first.drawn_sum is not None
    assert second.drawn_sum is not None
    drawn = used & ~np.isnan(first.mark) & np.isfinite(first.drawn_sum + second.drawn_sum)
    score = expected_score(
        first.mark[drawn],
        second.drawn_sum[drawn] - first.drawn_sum[drawn],
        first.prompt[drawn],
    )
    return {
        "tokens to divergence": bool(medians[0] != medians[1]),
        "expected score": score.change is not None and excludes(score.change),
    }


def excludes(change: Interval) -> bool:
    return change.low > MARGIN or change.high < -MARGIN


if __name__ == "__main__":
    main()
