"""Train the runs of an experiment that are not there yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from qaudit.lab.experiments.plan import Training, is_trained
from qaudit.lab.experiments.price import keep_rate
from qaudit.lab.text import TokenStream, prepare
from qaudit.lab.train import train

Progress = Callable[[str, int, int, float], None]
"""Is told the run, its step, its steps, and the loss."""


def train_missing(
    wanted: Sequence[Training],
    runs: Path,
    *,
    size: str,
    device: str,
    compiled: bool,
    progress: Progress,
) -> None:
    """Train, in their order, the runs whose checkpoints are not all there.

    All lie in one folder, under the names of their keys, so that a fork finds its parent and an
    experiment what another trained. A run that was stopped goes on from its latest state.
    """
    missing = [training for training in wanted if not is_trained(training, runs)]
    if not missing:
        return
    text = stream(runs, missing[0].run.shape.vocabulary)
    for training in missing:
        rates: list[float] = []

        def tell(step: int, loss: float, rate: float) -> None:
            rates.append(rate)  # noqa: B023 - called within this turn of the loop
            progress(training.name, step, training.run.steps, loss)  # noqa: B023

        train(training.run, text, runs, device=device, compiled=compiled, progress=tell)
        if rates:
            keep_rate(runs, size, rates[-1])


def stream(runs: Path, vocabulary: int) -> TokenStream:
    """Return the text that runs are trained on: one for each size of vocabulary."""
    return prepare(runs.parent / f"text-{vocabulary}", vocabulary=vocabulary)
