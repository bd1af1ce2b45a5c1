"""A target and its prompts -> a folder of rollouts, with the hashes of what wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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

Write = Callable[[Sequence[DueSample]], list[Rollout]]


@dataclass(frozen=True)
class RolloutRequest:
    """What to write; a sampler's setting that is None is the checkpoint's own."""

    prompts: Path
    soup: bool  # whether a soup writes them, and no checkpoint
    sampling: Sampling
    server: Server | None = None


@dataclass(frozen=True, eq=False)
class _Writing:
    """What writes: a subject, its tokenizer, and how it is sampled."""

    subject: Subject
    hub: Hub | None
    recipe: Recipe
    options: RunOptions
    tokenizer: Any
    tokenizer_sha256: str
    prompts: tuple[Prompt, ...]
    sampler: Sampler
    end_ids: tuple[int, ...]
    context: int


def write_rollouts(
    recipe: Recipe, out: Path, options: RunOptions, request: RolloutRequest, watch: Watch = SILENT
) -> Rollouts:
    """Write what is missing of a folder of rollouts, and return all of it."""
    if request.sampling.marks is not None:
        # What is wrong with it is said before hours go into answers.
        read_marks(request.sampling.marks)
    source = _source(recipe, options, request, watch)
    device, dtype = choose_audited(recipe.device, recipe.dtype)
    engine = f"transformers {version('transformers')}, {dtype} on {device}"
    engine = "a server" if request.server else engine
    sampling, subject = request.sampling, source.subject
    asked = {  # all that decides the samples, by names that a refusal can print
        "weights": subject.content,
        "configuration": subject.first.settings_content,
        "tokenizer": source.tokenizer_sha256,
        "prompts": digest([(p.number, p.ids) for p in source.prompts]),
        **{name: getattr(sampling, name) for name in ("samples", "greedy", "max_tokens", "seed")},
        "sampler": asdict(source.sampler),
        "end_ids": list(source.end_ids),
        "engine": engine,
    }
    with one_writer(out):
        folder = RolloutFolder(out, asked)
        if not (out / HEADER).is_file():
            draws = [(k, False) for k in range(sampling.samples)]
            draws = [(0, True), *draws] if sampling.greedy else draws
            every = [DueSample(prompt, *draw) for prompt in source.prompts for draw in draws]
            due = [row for row in every if row.key not in folder.samples]
            with _writer(source, request, (device, dtype)) as write:
                for rows in _batches(due, of_one_length=request.server is None):
                    folder.add(write(rows))
                    watch.count("samples", len(folder.samples), len(every))
            header = RolloutHeader(
                format=FORMAT,
                target=subject.label if subject.merge else str(subject.first.ref),
                revision=subject.first.commit,
                weights_sha256=subject.content,
                tokenizer_sha256=source.tokenizer_sha256,
                sampler=source.sampler,
                seed=sampling.seed,
                count=0,
                rollouts_sha256="",
                end_ids=source.end_ids,
                engine=engine,
            )
            folder.finish(header)
            write_texts(out, source.tokenizer)
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
def _writer(source: _Writing, request: RolloutRequest, machine: tuple[str, str]) -> Iterator[Write]:
    def drawing(prompt: Prompt) -> DrawSettings:
        room = source.context - len(prompt.ids)
        if room < 1:
            raise UsageError(
                f"prompt {prompt.number} has {len(prompt.ids)} tokens, and the model reads "
                f"{source.context}",
                hint="shorten it, or leave it out",
            )
        tokens = min(request.sampling.max_tokens, room)
        return DrawSettings(source.sampler, request.sampling.seed, tokens, source.end_ids)

    if request.server is not None:
        client = ServerClient(request.server, source.tokenizer)
        yield lambda rows: client.complete(rows, [drawing(row.prompt) for row in rows])
        return
    from qaudit.engine.block_pass import open_weights
    from qaudit.engine.tasks import open_device
    from qaudit.model.device import fits_whole
    from qaudit.model.skeleton import load_whole
    from qaudit.rollouts.generate import generate

    opened, dtype = open_device(*machine)
    subject, options = source.subject, source.options
    with Downloads(source.hub, (subject,)) as downloads, downloads.ready(subject):
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
    yield lambda rows: generate(model, rows, drawing(rows[0].prompt))


def _source(recipe: Recipe, options: RunOptions, request: RolloutRequest, watch: Watch) -> _Writing:
    hub = open_hub(watch=watch) if any(map(is_hub, recipe.targets)) else None
    subject = _subject(recipe, hub, soup=request.soup)
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
        prompts = read_prompts(request.prompts, tokenizer, chat)
    config = read_configuration(folder_of(subject.first))
    generation: Mapping[str, Any] = {}
    if (folder_of(subject.first) / _GENERATION).is_file():
        generation = read_configuration(folder_of(subject.first), _GENERATION)
    text_config = config.get("text_config") or config
    end_ids: list[int] = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        end_ids += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    return _Writing(
        subject, hub, recipe, options, tokenizer, tokenizer_sha256(folders), prompts,
        _sampler(generation, request), tuple(dict.fromkeys(end_ids)),
        longest_context({**config, **text_config}, _UNBOUNDED),
    )  # fmt: skip


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


def _sampler(generation: Mapping[str, Any], request: RolloutRequest) -> Sampler:
    """Return the sampler that was requested; what was not is the checkpoint's own, if it samples.

    Penalties of a checkpoint are left out: they make the next token depend on more than its logits.
    """
    usual = generation if generation.get("do_sample") else {}
    try:
        sampler = Sampler(
            temperature=float(_first(request.sampling.temperature, usual.get("temperature"), 1.0)),
            top_k=int(_first(request.sampling.top_k, usual.get("top_k"), 0)) or None,
            top_p=float(_first(request.sampling.top_p, usual.get("top_p"), 1.0)),
        )
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"`{_GENERATION}` has a sampler that is none: {error}",
            hint="give `--temperature`, `--set top_k=N` and `--set top_p=P`",
        ) from error
    if sampler.temperature <= 0 or not 0 < sampler.top_p <= 1 or (sampler.top_k or 1) < 0:
        raise UsageError(
            f"a sampler with a temperature of {sampler.temperature:g}, a top-k of "
            f"{sampler.top_k or 'all'} and a top-p of {sampler.top_p:g} draws nothing",
            hint="`--samples 0` writes greedy rollouts alone",
        )
    return sampler


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
