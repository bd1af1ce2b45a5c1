"""A target and its prompts -> a folder of rollouts, with the hashes of what wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from qaudit.checkpoints.configuration import longest_context, read_configuration
from qaudit.checkpoints.stamps import folder_of
from qaudit.downloads.downloads import Downloads
from qaudit.errors import ConfigurationError, ModelError, UsageError
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import is_hub
from qaudit.planning.machine import choose_audited
from qaudit.planning.resolve import resolve, resolve_soup
from qaudit.planning.survey import refuse
from qaudit.rollouts.folder import (
    DrawSettings,
    DueSample,
    Prompt,
    RolloutFolder,
    add_marks,
    read_marks,
    read_prompts,
    write_texts,
)
from qaudit.rollouts.server import Server, ServerClient
from qaudit.sandbox import Templates
from qaudit.saved.parts import one_writer
from qaudit.settings import Recipe, RunOptions, Sampling
from qaudit.text.chat import Chat
from qaudit.text.rollouts import (
    FORMAT,
    HEADER,
    Rollout,
    RolloutHeader,
    Rollouts,
    Sampler,
    read_rollouts,
)
from qaudit.text.tokenizer import borrowed_tokenizer, tokenizer_of, tokenizer_sha256
from qaudit.types import SILENT, Subject, Watch, digest

_ROWS = 32
"""Of a batch at most; each keeps the keys and values of its tokens."""
_GENERATION = "generation_config.json"
_UNBOUNDED = 1 << 20


def write_rollouts(
    recipe: Recipe,
    out: Path,
    options: RunOptions,
    path: Path,
    sampling: Sampling,
    watch: Watch = SILENT,
    *,
    soup: bool = False,
) -> Rollouts:
    """Write what is missing of a folder of rollouts behind a file of prompts; return all of it."""
    if sampling.marks is not None:
        # What is wrong with it is said before hours go into answers.
        read_marks(sampling.marks)
    model_there = sampling.served_model or recipe.targets[0]
    server = Server(sampling.server, model_there) if sampling.server else None
    hub = open_hub(watch=watch) if any(map(is_hub, recipe.targets)) else None
    subject = _subject(recipe, hub, soup=soup)
    members = [checkpoint for checkpoint, _ in subject.members]
    refuse(members, allow_pickle=options.allow_pickle, trust_remote_code=options.trust_remote_code)
    if hub is not None:
        for checkpoint in members:
            hub.fetcher.settings(checkpoint, code=options.trust_remote_code)
    borrowed = borrowed_tokenizer(hub, members)
    folders = [folder_of(borrowed)] if borrowed else [folder_of(c) for c in members]
    tokenizer, _ = tokenizer_of(folders, options.trust_remote_code)
    with Templates() as templates:
        chat = Chat(folders, tokenizer, templates, recipe.chat_template)
        prompts = read_prompts(path, tokenizer, chat)
    sampler, end_ids, context = _drawn_by(folder_of(subject.first), tokenizer, sampling)
    device, dtype = choose_audited(recipe.device, recipe.dtype)
    about: dict[str, Any] = {
        "end_ids": end_ids,
        "engine": "a server"
        if server
        else f"transformers {version('transformers')}, {dtype} on {device}",
    }
    request = {  # all that decides the samples, by names that a refusal can print
        "weights": subject.content,
        "configuration": subject.first.settings_content,
        "tokenizer": tokenizer_sha256(folders),
        "prompts": digest([(p.number, p.ids) for p in prompts]),
        **{name: getattr(sampling, name) for name in ("samples", "greedy", "max_tokens", "seed")},
        "sampler": asdict(sampler),
        **about,
    }

    def drawing(prompt: Prompt) -> DrawSettings:
        room = context - len(prompt.ids)
        if room < 1:
            raise UsageError(
                f"prompt {prompt.number} has {len(prompt.ids)} tokens, and the model reads "
                f"{context}",
                hint="shorten it, or leave it out",
            )
        return DrawSettings(sampler, sampling.seed, min(sampling.max_tokens, room), end_ids)

    with one_writer(out):
        folder = RolloutFolder(out, request)
        if not (out / HEADER).is_file():
            draws = [(k, False) for k in range(sampling.samples)]
            draws = [(0, True), *draws] if sampling.greedy else draws
            every = [DueSample(prompt, *draw) for prompt in prompts for draw in draws]
            due = [row for row in every if row.key not in folder.samples]
            with _writer(server, tokenizer, hub, subject, options, (device, dtype)) as write:
                for rows in _batches(due, of_one_length=server is None):
                    folder.add(write(rows, [drawing(row.prompt) for row in rows]))
                    watch.count("samples", len(folder.samples), len(every))
            header = RolloutHeader(
                format=FORMAT,
                target=subject.label if subject.merge else str(subject.first.ref),
                revision=subject.first.commit,
                weights_sha256=subject.content,
                tokenizer_sha256=request["tokenizer"],
                sampler=sampler,
                seed=sampling.seed,
                count=0,
                rollouts_sha256="",
                **about,
            )
            folder.finish(header)
            write_texts(out, tokenizer)
        if sampling.marks is not None:
            add_marks(out, sampling.marks)
    return read_rollouts(out)


def _batches(due: Sequence[DueSample], *, of_one_length: bool) -> Iterator[list[DueSample]]:
    """Yield rows, the shortest prompts first; a model reads prompts of one length at once."""
    ordered = sorted(due, key=lambda row: len(row.prompt.ids))
    for _, group in groupby(ordered, key=lambda row: of_one_length and len(row.prompt.ids)):
        rows = [*group]
        yield from (rows[k : k + _ROWS] for k in range(0, len(rows), _ROWS))


@contextmanager
def _writer(
    server: Server | None,
    tokenizer: Any,
    hub: Hub | None,
    subject: Subject,
    options: RunOptions,
    machine: tuple[str, str],
) -> Iterator[Callable[[Sequence[DueSample], Sequence[DrawSettings]], list[Rollout]]]:
    if server is not None:
        yield ServerClient(server, tokenizer).complete
        return
    from qaudit.engine.block_pass import open_weights
    from qaudit.engine.tasks import open_device
    from qaudit.model.device import fits_whole
    from qaudit.model.skeleton import load_whole
    from qaudit.rollouts.generate import generate

    opened, dtype = open_device(*machine)
    with Downloads(hub, (subject,)) as downloads, downloads.ready(subject):
        weights = open_weights(subject, allow_pickle=options.allow_pickle, folder=downloads.folder)
        if not fits_whole(weights, dtype, opened):
            raise ModelError(
                f"`{subject.label}` does not fit in memory as a whole, and generating needs all of "
                "it",
                hint="serve it on a larger machine and generate with `--server`",
            )
        trusted = options.trust_remote_code
        place = folder_of(subject.first)
        model = load_whole(place, weights, dtype, trust_remote_code=trusted).to(opened)
    # Prompts of a batch have one length, and so as much room behind them.
    yield lambda rows, drawings: generate(model, rows, drawings[0])


def _subject(recipe: Recipe, hub: Hub | None, *, soup: bool) -> Subject:
    if soup:
        return resolve_soup(recipe, hub)
    subjects = [s for s in resolve(recipe, hub).subjects if s.kind == "checkpoint"]
    if len(subjects) == 1:
        return subjects[0]
    labels = ", ".join(f"`{subject.label}`" for subject in subjects[-3:])
    raise UsageError(
        f"`{recipe.targets[0]}` has {len(subjects)} checkpoints, and one writes rollouts",
        hint=f"choose it with `--checkpoints`, or a soup with `--soup`: the last are {labels}",
    )


def _drawn_by(
    folder: Path, tokenizer: Any, sampling: Sampling
) -> tuple[Sampler, tuple[int, ...], int]:
    """Return the sampler that was requested, the tokens that end a sample, and the context.

    What was not requested is the checkpoint's own, if it samples. Penalties of a checkpoint are
    left out: they make the next token depend on more than its logits.
    """
    config = read_configuration(folder)
    generation: Mapping[str, Any] = {}
    if (folder / _GENERATION).is_file():
        generation = read_configuration(folder, _GENERATION)
    end_ids: list[int] = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        end_ids += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    usual = generation if generation.get("do_sample") else {}
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    values = [
        next(v for v in (getattr(sampling, name), usual.get(name), value) if v is not None)
        for name, value in neutral.items()
    ]
    try:
        temperature, top_k, top_p = float(values[0]), int(values[1]) or None, float(values[2])
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"`{_GENERATION}` has a sampler that is none: {error}",
            hint="give `--temperature`, `--set top_k=N` and `--set top_p=P`",
        ) from error
    if temperature <= 0 or not 0 < top_p <= 1 or (top_k or 1) < 0:
        raise UsageError(
            f"a sampler with a temperature of {temperature:g}, a top-k of {top_k or 'all'} and a "
            f"top-p of {top_p:g} draws nothing",
            hint="`--samples 0` writes greedy rollouts alone",
        )
    context = longest_context({**config, **(config.get("text_config") or config)}, _UNBOUNDED)
    return Sampler(temperature, top_k, top_p), tuple(dict.fromkeys(end_ids)), context
