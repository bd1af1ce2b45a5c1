"""What a pass begins with: weights, the files and the reference beside them, text in batches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from qaudit.checkpoints.adapters import open_checkpoint
from qaudit.checkpoints.places import folder_of, own_folder, weights_of
from qaudit.checkpoints.safetensors import unread_tensors
from qaudit.core.registry import parse_merge
from qaudit.core.shipped import Shipped
from qaudit.engine.batches import TOKENS_PER_BATCH, backwards, make_batches, make_rollout_batches
from qaudit.engine.hidden_states import HiddenStates
from qaudit.engine.reference import opener as open_reference
from qaudit.engine.route import Route
from qaudit.engine.shipped import opener
from qaudit.engine.tasks import Machine, Task
from qaudit.engine.tokens import Feed, Openers
from qaudit.formats.weights import QuantizedFolder, quantization_of
from qaudit.model.blocks import BlockModel, Weights
from qaudit.model.config import must_be_one_architecture
from qaudit.model.merged import MergedWeights
from qaudit.types import Checkpoint, Subject


def open_weights(
    subject: Subject, *, allow_pickle: bool, folder: Callable[[Checkpoint], Path] = own_folder
) -> Weights:
    """Open a subject's weights: a checkpoint's as they are, a soup's merged as they are read."""
    places = [folder(checkpoint) for checkpoint, _ in subject.members]
    if subject.merge is None and not subject.first.is_adapter and quantization_of(places[0]):
        return QuantizedFolder(places[0])
    without = unread_tensors(places, [checkpoint for checkpoint, _ in subject.members])
    members = [
        open_checkpoint(checkpoint, allow_pickle=allow_pickle, folder=folder, without=without)
        for checkpoint, _ in subject.members
    ]
    if subject.merge is None:
        return members[0]
    labels = [checkpoint.label for checkpoint, _ in subject.members]
    shares = [share for _, share in subject.members]
    merged = MergedWeights(labels, members, shares, parse_merge(subject.merge))
    must_be_one_architecture(labels, [folder_of(checkpoint) for checkpoint, _ in subject.members])
    return merged


def route_of(task: Task, weights: Weights, machine: Machine) -> Route:
    """Return how a task's weights are run."""
    return Route(
        folder_of(task.subject.first),
        weights,
        machine.dtype,
        machine.device,
        trust_remote_code=machine.trust_remote_code,
        experts=machine.experts,
    )


@contextmanager
def opened_states(machine: Machine) -> Iterator[HiddenStates]:
    """Hold hidden states for one pass."""
    with (
        tempfile.TemporaryDirectory(prefix="qaudit-") as spill,
        HiddenStates(
            Path(spill),
            machine.stream_limit_nbytes,
            machine.device,
            machine.device_stream_limit_nbytes,
        ) as states,
    ):
        yield states


def feed_of(task: Task) -> Feed:
    """Return the batches of a pass; of one that rounds otherwise, smaller and in reverse."""
    corpus, context, limit = task.corpus, task.corpus.protocol.context, task.pad_until
    scored, half = corpus.evaluation, TOKENS_PER_BATCH // 2
    if not task.perturbed:
        documents = make_batches(scored, context, pad_until=limit)
        return Feed(
            make_batches(corpus.calibration, context, pad_until=limit),
            (*documents, *make_rollout_batches(corpus, pad_until=limit)),
            full_precision=task.pass_.full_precision,
            compared=task.compared,
            items=corpus.windows_by_task,
        )
    return Feed(
        calibration=backwards(make_batches(corpus.calibration, context, half, limit)),
        evaluation=make_batches(scored, context, half, limit),
        full_precision=task.pass_.full_precision,
        compared=task.compared,
        perturbed=True,
    )


def openers_of(task: Task, weights: Weights) -> Openers:
    """Return a function that opens each shipped file of a task."""
    names, base = frozenset(weights.names()), folder_of(task.subject.first)
    places = {
        shipped.label: weights_of(shipped, task.folder(shipped)) for shipped in task.pass_.shipped
    }
    return {
        scheme.spec: opener(scheme, places[scheme.file], base, names)
        for scheme in task.schemes
        if isinstance(scheme, Shipped)
    }


def reference_of(task: Task, machine: Machine) -> Callable[[BlockModel], BlockModel] | None:
    """Return a function that opens the reference beside a model, where a pass has one."""
    subject = task.pass_.reference
    if subject is None:
        return None
    return open_reference(
        subject.label,
        folder_of(subject.first) if subject.first.base else task.folder(subject.first),
        partial(open_weights, subject, allow_pickle=machine.allow_pickle, folder=task.folder),
        trust_remote_code=machine.trust_remote_code,
    )
