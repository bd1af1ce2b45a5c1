"""How large the models and the texts of a plan are, before the first byte of weights is read.

Models: by the names and shapes in safetensors headers. The most common numbered prefix is the
blocks; everything else is embeddings, norms and head.

Texts: cut as a run cuts them, with the checkpoint's own `tokenizer.json`, so that what a run
would refuse (a document in both texts, too little text for several draws) is refused by the plan
already. Text that is still on the Hub is bounded: each document fills one window, or as many
tokens as `document_tokens` allows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from qaudit.checkpoints.configuration import unreadable
from qaudit.checkpoints.stamps import folder_of, text_path
from qaudit.core.linears import STEP_TOKENS
from qaudit.core.mixture import FITTED, SCORED
from qaudit.core.scheme import Calibration, Scheme
from qaudit.errors import ConfigurationError, CorpusError, ModelError
from qaudit.items.harness import bound, items_of, most_items
from qaudit.items.prepare import Reading, counted, tasks_of
from qaudit.items.tokens import ItemText
from qaudit.support.sizes import size
from qaudit.text.rollouts import read_rollouts
from qaudit.text.texts import cut_texts, is_hub_text
from qaudit.text.tokenizer import tokenizer_sha256
from qaudit.types import Checkpoint, Protocol, Recipe, TextFile

ROUND_TOKENS = 1_000_000  # of items of several tasks that go through blocks together

_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")


@dataclass(frozen=True)
class Sizes:
    """What the headers tell of a model's shape."""

    parameters: int
    blocks: int
    block_parameters: int  # of the largest block
    rest_parameters: int  # embeddings, final norm, head
    hidden: int
    widest: int  # the longest side of a matrix in a block
    vocabulary: int
    tensors: int = field(default=1 << 40, compare=False)  # unknown where no header was read
    # Of blocks, by block and name: empty where no header was read.
    matrices: Mapping[tuple[int, str], tuple[int, int]] = field(default_factory=dict, compare=False)
    expert_parameters: int = 0  # of the largest block
    experts: int = 0  # of a layer
    per_token: int = 0  # experts that read a token
    beside: int = 0  # numbers a token beside its hidden states, in each stream
    given: int = 0  # numbers that a model makes of a token for its blocks

    @property
    def active_parameters(self) -> int:
        """Parameters of a block that a token goes through."""
        if not self.experts:
            return self.block_parameters
        idle = self.expert_parameters * (self.experts - self.per_token) // self.experts
        return self.block_parameters - idle

    @property
    def quantized_together(self) -> int:
        """Parameters of a block that are quantized side by side: its dense ones, or an expert."""
        if not self.experts:
            return self.block_parameters
        return self.block_parameters - self.expert_parameters * (self.experts - 1) // self.experts

    @classmethod
    def of_config(cls, config: Mapping[str, Any], name: str) -> Sizes:
        """Estimate the sizes from a model's configuration, where no header can be read."""
        config = {**config, **(config.get("text_config") or {})}
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        sizes = [config.get(key) for key in names]
        if not all(isinstance(value, int) and value > 0 for value in sizes):
            raise ModelError(
                f"the size of `{name}` is not defined by its `config.json`",
                hint="convert its weights to safetensors: their headers say it",
            )
        hidden, inner, blocks, vocabulary = (int(value) for value in sizes if value)
        heads = config.get("num_attention_heads") or 1
        shared = config.get("num_key_value_heads") or heads
        attention = 2 * hidden**2 + 2 * hidden * hidden * shared // heads
        experts = first_whole(config, *_EXPERTS)
        of_expert = 3 * hidden * int(config.get("moe_intermediate_size") or inner)
        block = attention + (experts * of_expert or 3 * hidden * inner) + 2 * hidden
        rest = (1 if config.get("tie_word_embeddings") else 2) * vocabulary * hidden + hidden
        return cls(
            parameters=rest + blocks * block,
            blocks=blocks,
            block_parameters=block,
            rest_parameters=rest,
            hidden=hidden,
            widest=max(hidden, inner),
            vocabulary=vocabulary,
        )

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], name: str) -> Sizes:
        """Tell blocks from the rest by the most common numbered prefix."""
        numbered = [(m, tensor) for tensor in shapes if (m := re.match(r"(.*?)\.(\d+)\.", tensor))]
        if not numbered:
            raise ModelError(f"`{name}` holds no numbered blocks", hint="is it a causal LM?")
        prefix = Counter(m.group(1) for m, _ in numbered).most_common(1)[0][0]
        per_block, of_experts = Counter[int](), Counter[int]()
        widest, inner = 1, {}
        for match, tensor in numbered:
            if match.group(1) == prefix:
                block, shape = int(match.group(2)), shapes[tensor]
                per_block[block] += prod(shape)
                if re.search(r"\bexperts\b", tensor):
                    of_experts[block] += prod(shape)
                widest = max((widest, *shape))
                if len(shape) == 2:
                    name = tensor[match.end() :].removesuffix(".weight")
                    inner[block, name] = (int(shape[0]), int(shape[1]))
        total = sum(prod(shape) for shape in shapes.values())
        # A table of inputs of blocks is wider than hidden states.
        matrices = [
            s
            for t, s in shapes.items()
            if len(s) == 2 and not t.startswith(f"{prefix}.") and "per_layer" not in t
        ]
        embedding = max(matrices, key=lambda s: s[0] * s[1], default=[1, 1])
        return cls(
            parameters=total,
            blocks=len(per_block),
            block_parameters=max(per_block.values()),
            rest_parameters=total - sum(per_block.values()),
            hidden=min(embedding),
            widest=widest,
            vocabulary=max(embedding),
            tensors=len(shapes),
            matrices=inner,
            expert_parameters=max(of_experts.values(), default=0),
        )


@dataclass(frozen=True)
class TextSize:
    """Tokens that go through a model, those that overlap counted as often as they do."""

    calibration_tokens: int
    evaluation_tokens: int
    context: int  # tokens that attend to one another
    documents: int | None = None  # of the evaluation text; None: not counted
    item_tokens: int = 0  # of tasks and multiple-choice items, what the model shares once
    largest_task_tokens: int = 0  # of `item_tokens`
    items: tuple[tuple[str, int], ...] = ()  # of each task
    items_counted: bool = True
    rollout_tokens: int = 0  # of `evaluation_tokens`

    @property
    def of_documents(self) -> TextSize:
        """The text without items and rollouts, which a subject's first pass alone reads."""
        tokens = self.evaluation_tokens - self.rollout_tokens
        return replace(
            self, evaluation_tokens=tokens, item_tokens=0, largest_task_tokens=0, rollout_tokens=0
        )

    @classmethod
    def bound(cls, protocol: Protocol) -> TextSize:
        """Return the size of text that is not on this machine."""
        each = protocol.document_tokens or protocol.context
        calibration, evaluation = protocol.calibration_documents, protocol.evaluation_documents
        return cls(calibration * each, evaluation * each, protocol.context)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the price has to know."""
        notes = []
        if not self.items_counted:
            notes.append("the prompts of tasks are not built yet: their tokens are an estimate")
        if self.documents is None:
            notes.append(
                "the text was not counted, because it or its tokenizer is not on this machine: "
                "time and memory assume one window for each document"
            )
        return tuple(notes)


@dataclass(frozen=True)
class Load:
    """What goes through a model side by side."""

    schemes: tuple[Scheme, ...]
    text: TextSize
    streams: int  # models that are evaluated

    @classmethod
    def of(cls, schemes: Sequence[Scheme], text: TextSize, full_precision: int = 1) -> Load:
        return cls(tuple(schemes), text, len(schemes) + full_precision)

    @property
    def with_streams(self) -> int:
        """How many schemes calibrate on what they made of earlier linears."""
        return sum(scheme.calibration.has_stream for scheme in self.schemes)

    @property
    def calibrated(self) -> int:
        """How many streams the calibration text goes through."""
        shared = any(scheme.calibration.reads_full_precision for scheme in self.schemes)
        return self.with_streams + shared

    @property
    def learns(self) -> bool:
        return any(scheme.calibration is Calibration.WHOLE_BLOCK for scheme in self.schemes)

    @property
    def mixes_bits(self) -> bool:
        return any(scheme.mixes_bits for scheme in self.schemes)

    @property
    def choosing_tokens(self) -> int:
        """Tokens that the bits of mixtures are chosen on."""
        return min(FITTED + SCORED, self.text.calibration_tokens)

    @property
    def step_tokens(self) -> int:
        """Tokens of a mini-batch that is learned on."""
        return min(max(STEP_TOKENS, self.text.context), self.text.calibration_tokens)

    @property
    def round_tokens(self) -> int:
        """Tokens that are evaluated together."""
        return self.text.evaluation_tokens + self.item_round_tokens

    @property
    def item_round_tokens(self) -> int:
        """Tokens of items that are evaluated together: rounds of whole tasks."""
        return max(self.text.largest_task_tokens, min(self.text.item_tokens, ROUND_TOKENS))


def text_size(
    recipe: Recipe,
    protocol: Protocol,
    checkpoints: Sequence[Checkpoint],
    texts: Sequence[TextFile],
    *,
    trees: bool,
    longest: int,
) -> TextSize:
    """Count the text of a plan, or bound it.

    `trees`: whether all models share contexts; `longest`: tokens that all of them read.
    """
    places = {text.source: text_path(text) for text in texts}
    sources = [s for s in (recipe.calibration, recipe.evaluation, recipe.choices) if s]
    on_disk = all(not is_hub_text(s) or (s in places and places[s].is_file()) for s in sources)
    tokenizer = _tokenizer(checkpoints) if on_disk else None
    if tokenizer is None:
        text = TextSize.bound(protocol)
    else:
        folders = [folder_of(c) for c in checkpoints]
        corpus, _ = cut_texts(recipe, places, tokenizer, protocol, folders)
        items = ItemText(corpus.items, corpus.item_windows)
        text = TextSize(
            calibration_tokens=sum(len(window.tokens) for window in corpus.calibration),
            evaluation_tokens=sum(len(window.tokens) for window in corpus.evaluation),
            context=protocol.context,
            documents=len(corpus.documents),
            item_tokens=items.tokens(trees=trees),
            largest_task_tokens=max(items.task_tokens(trees=trees).values(), default=0),
            items=tuple(items.counts.items()),
        )
    if recipe.rollouts is not None:
        samples = read_rollouts(Path(recipe.rollouts)).samples
        tokens = [len(sample.ids) + len(sample.new_ids) for sample in samples]
        if max(tokens) > longest:
            raise CorpusError(
                f"a rollout in `{recipe.rollouts}` has {max(tokens):,} tokens with its prompt, and "
                f"the models read {longest:,}",
                hint="write rollouts with a lower `--max-tokens`",
            )
        text = replace(
            text,
            evaluation_tokens=text.evaluation_tokens + sum(tokens),
            rollout_tokens=sum(tokens),
            context=max(text.context, *tokens),
        )
    if not recipe.tasks:
        return text
    key = tokenizer_sha256([folder_of(c) for c in checkpoints])
    built = counted(Reading(recipe, texts, key, protocol.item_context or protocol.context))
    if built is not None:
        counts, task_tokens = built.counts, built.task_tokens(trees=trees)
    else:  # they were not built before
        most, names = most_items(recipe.task_items), [task.name for task in tasks_of(recipe)]
        counts = items_of(names, most)
        task_tokens = bound(names, most, recipe.task_shots, trees=trees)
    return replace(
        text,
        item_tokens=text.item_tokens + sum(task_tokens.values()),
        largest_task_tokens=max(text.largest_task_tokens, *task_tokens.values()),
        items=(*text.items, *counts.items()),
        items_counted=built is not None,
    )


class _Tokenizer:
    """A `tokenizer.json` as the text room reads a tokenizer, without transformers and torch."""

    is_fast = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        ends = (tokenizer.token_to_id(name) for name in ("<|endoftext|>", "</s>", "<s>"))
        self.added_tokens_decoder = tokenizer.get_added_tokens_decoder()
        self.bos_token_id = self.eos_token_id = next((id for id in ends if id is not None), 0)

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool = True, **_: Any
    ) -> dict[str, Any]:
        if isinstance(text, list):
            every = self._tokenizer.encode_batch(text, add_special_tokens=add_special_tokens)
            return {"input_ids": [encoded.ids for encoded in every]}
        encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}

    def decode(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


def _tokenizer(checkpoints: Sequence[Checkpoint]) -> _Tokenizer | None:
    """Return the first tokenizer that can be read; the run reports what is wrong with one."""
    files = [folder_of(c) / "tokenizer.json" for c in checkpoints]
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        return None
    from tokenizers import Tokenizer

    with suppress(ConfigurationError), unreadable(f"`{path}` cannot be read"):
        return _Tokenizer(Tokenizer.from_file(str(path)))
    return None


_INDEX_NBYTES, _NUMBER_NBYTES = 8, 2
_HANDED_ON = ("indexer_types", "index_topk_freq", "index_topk_pattern")
_COPIES = ("hc_mult", "altup_num_inputs")  # hidden states of a token


def with_config(sizes: Sizes, config: Mapping[str, Any]) -> Sizes:
    """Return the sizes with the experts of a layer, and what waits beside a token's states."""
    config = {**config, **(config.get("text_config") or {})}
    count, each = (first_whole(config, *names) for names in (_EXPERTS, _PER_TOKEN))
    if count and each:
        sizes = replace(sizes, experts=count, per_token=min(each, count))
    copies = max(first_whole(config, *_COPIES), 1)
    beside = (copies - 1) * sizes.hidden + _shared_keys(config)
    if any(config.get(name) for name in _HANDED_ON):  # what a sparse indexer leaves, as numbers
        beside += first_whole(config, "index_topk") * _INDEX_NBYTES // _NUMBER_NBYTES
    given = first_whole(config, "hidden_size_per_layer_input") * sizes.blocks
    return replace(sizes, beside=beside + first_whole(config, "router_hidden_size"), given=given)


def beside_notes(sizes: Sizes, itemsize: int, context: int) -> Iterator[str]:
    """Yield what a document takes beside its hidden states."""
    if sizes.beside:
        nbytes = sizes.beside * itemsize * context
        yield (
            f"beside {sizes.hidden:,} numbers of a token, blocks leave {sizes.beside:,} for later "
            f"blocks: {size(nbytes)} for a document of {context:,} tokens, in each stream"
        )
    if sizes.given:
        nbytes = sizes.given * itemsize * context
        yield (
            f"the model makes {sizes.given:,} numbers of a token for its blocks, which all streams "
            f"share: {size(nbytes)} for a document of {context:,} tokens"
        )


def _shared_keys(config: Mapping[str, Any]) -> int:
    """Return the keys and values of a token that later blocks read, one of each kind of layer."""
    sources = config.get("kv_source_layers")
    if isinstance(sources, list) and sources != list(range(len(sources))):  # latents, of two kinds
        return 2 * (first_whole(config, "kv_lora_rank") + first_whole(config, "qk_rope_head_dim"))
    count, kinds = first_whole(config, "num_kv_shared_layers"), config.get("layer_types")
    if not count:
        return 0
    last = kinds[-count:] if isinstance(kinds, list) else ["full_attention"]
    total = 0
    for kind in {str(kind) for kind in last}:
        is_full = kind == "full_attention"
        heads = ("num_global_key_value_heads",) * is_full + ("num_key_value_heads",)
        widths = ("global_head_dim",) * is_full + ("head_dim",)
        total += 2 * first_whole(config, *heads) * first_whole(config, *widths)
    return total


def first_whole(config: Mapping[str, Any], *names: str) -> int:
    """Return the first number above zero that a configuration has under some names, or zero."""
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)
