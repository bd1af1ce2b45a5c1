"""An exported folder as it runs: loss and KL divergence on the documents of an audit.

Full precision goes through in blocks first, and only its hidden states are kept, in memory up to
a limit and in files past it. Then the folder is loaded in its runtime: the one model that is in
memory as a whole.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from qaudit.checkpoints.configuration import read_configuration, unreadable
from qaudit.checkpoints.stamps import folder_of
from qaudit.core import statistics
from qaudit.core.fidelity import ComparedRows, Reference, row_parts
from qaudit.downloads.downloads import Downloads
from qaudit.engine.batches import make_batches
from qaudit.engine.block_pass import Route, open_weights, opened_states
from qaudit.engine.read_out import evidence_of, rows_of
from qaudit.engine.tally import RoutingWatch, Tally
from qaudit.engine.tokens import Feed, Tokens
from qaudit.errors import ModelError, UsageError
from qaudit.executors.part import Ready, make_ready
from qaudit.export import llamacpp
from qaudit.export.choice import ExportChoice
from qaudit.formats.gguf import FILE as GGUF
from qaudit.formats.packing import formats
from qaudit.model.config import class_of, read_config
from qaudit.model.proven import pad_until
from qaudit.model.skeleton import forget_lengths
from qaudit.saved.exports import ExportRecord
from qaudit.support.keys import nearest
from qaudit.types import FULL_PRECISION, Corpus, Evidence, Interval, Policy, Tolerances, Watch


@dataclass(frozen=True)
class Loaded:
    """A folder in its runtime: what it predicts behind every token of a window but the last."""

    vocabulary: int
    predicted: Callable[[Tensor], Tensor]  # logits (B, T - 1, V), or losses (B, T - 1) of vLLM


@dataclass(frozen=True)
class Program:
    """A program and the packages it needs; a format says which programs load it."""

    name: str
    packages: tuple[str, ...]
    load: Callable[[Path, torch.dtype], Loaded]
    rounds_activations: bool = False

    def missing(self, form: str) -> tuple[str, ...]:
        return tuple(n for n in self._needed(form) if find_spec(n.replace("-", "_")) is None)

    def described(self, form: str) -> str:
        def version_of(name: str) -> str:
            try:
                return version(name)
            except PackageNotFoundError:
                return "?"

        return ", ".join(f"{name} {version_of(name)}" for name in self._needed(form))

    def _needed(self, form: str) -> tuple[str, ...]:
        return (*self.packages, *formats()[form].loaded_by[self.name])


def _is_symmetric(config: dict[str, Any]) -> bool:
    return bool(config["config_groups"]["group_0"]["weights"]["symmetric"])


@dataclass(frozen=True)
class Limit:
    """By how many nats per token a file may run otherwise than it was audited, and why."""

    loss: float
    kl: float
    why: str


def _transformers(folder: Path, dtype: torch.dtype) -> Loaded:
    options: dict[str, Any] = {}
    config = read_configuration(folder).get("quantization_config", {})
    if config.get("quant_method") == "compressed-tensors" and not _is_symmetric(config):
        from transformers import CompressedTensorsConfig

        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    if str(config.get("format", "")).endswith("fp4-pack-quantized"):
        dtype = torch.bfloat16  # to which compressed-tensors decodes 4-bit floats
    disable_progress_bar()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of `dequantize`
        if config.get("quant_method") == "bitsandbytes":
            options["device_map"] = "cpu"  # else it looks for a GPU; this needs accelerate
        model = class_of(read_config(folder)).from_pretrained(folder, dtype=dtype, **options)
    return _of_library(model.eval())


def _of_library(model: Any) -> Loaded:
    forget_lengths(model)

    def logits(tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = model(input_ids=tokens_BT, use_cache=False).logits
        return logits_BTV[:, :-1]

    return Loaded(int(model.config.get_text_config().vocab_size), logits)


def _gptqmodel(folder: Path, dtype: torch.dtype) -> Loaded:
    from gptqmodel import BACKEND, GPTQModel

    method = read_configuration(folder)["quantization_config"]["quant_method"]
    backend = BACKEND.GPTQ_TORCH if method == "gptq" else BACKEND.AWQ_TORCH
    # Its plain kernel takes no float32.
    narrow = torch.bfloat16 if dtype == torch.float32 else dtype
    model = GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=narrow).model
    return _of_library(model.eval())


def _vllm(folder: Path, dtype: torch.dtype) -> Loaded:
    """Load a folder in vLLM, which tells the log-probability of each token of a prompt."""
    from vllm import LLM, SamplingParams

    narrow = torch.bfloat16 if dtype == torch.float32 else dtype  # its kernels take no float32
    engine = LLM(
        model=str(folder),
        dtype=str(narrow).removeprefix("torch."),
        enforce_eager=True,
        enable_prefix_caching=False,  # cached tokens have no log-probabilities
    )
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def losses(tokens_BT: Tensor) -> Tensor:
        prompts = [{"prompt_token_ids": row} for row in tokens_BT.tolist()]
        answers = engine.generate(prompts, asked, use_tqdm=False)
        told_BT = [answer.prompt_logprobs[1:] for answer in answers]
        rows = zip(told_BT, tokens_BT[:, 1:].tolist(), strict=True)
        return torch.tensor(
            [[-t[token].logprob for t, token in zip(*row, strict=True)] for row in rows]
        )

    return Loaded(1, losses)


def _llama_cpp(folder: Path, dtype: torch.dtype) -> Loaded:
    """Load a folder in llama.cpp, which chooses how it computes."""
    model = llamacpp.LlamaCpp(folder / GGUF)
    return Loaded(model.vocabulary, lambda tokens_BT: model(tokens_BT)[:, :-1])


def _mlx(folder: Path, dtype: torch.dtype) -> Loaded:
    """Load a folder in MLX, which computes in the types of its file."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)

    def logits(tokens_BT: Tensor) -> Tensor:
        logits_BTV = model(mx.array(tokens_BT.numpy())).astype(mx.float32)
        return torch.from_numpy(np.array(logits_BTV))[:, :-1]

    return Loaded(int(model.args.vocab_size), logits)


RUNTIMES = (
    Program("transformers", ("transformers",), _transformers),
    Program("gptqmodel", ("gptqmodel",), _gptqmodel),
    Program("vllm", ("vllm",), _vllm),
    Program("llama.cpp", ("xllamacpp",), _llama_cpp, rounds_activations=True),
    Program("mlx", ("mlx-lm",), _mlx),
)


def runtime_for(form: str, name: str | None) -> Program:
    able = [program for program in RUNTIMES if program.name in formats()[form].loaded_by]
    for program in able:
        if name in (None, program.name):
            return program
    raise UsageError(
        f"`{name}` is no runtime here that loads `{form}`",
        hint=nearest(str(name), [program.name for program in able]),
    )


def limit_of(
    runtime: Program, allowed: Tolerances, folder: Path, dtype: str, *, has_experts: bool
) -> Limit:
    """Return the limit that a runtime's arithmetic asks for; `dtype` is that of the audit.

    What runs in bfloat16 and was audited in float32 differs most where activations are rounded to 4
    bits, of which it moves some to the next code: the demo runs 3.6e-3 nats away as mxfp4, 1.5e-3
    as nvfp4. Where bitsandbytes' 4-bit kernel has AVX512-BF16, a product is off by 3.2e-3 of itself
    under `bnb_4bit_compute_dtype: float32` too: 1.7e-3 nats of 135M parameters, 3e-4 of the demo.
    """
    if runtime.rounds_activations:
        rounded = f"{runtime.name} rounds activations to 8 bits"
        return Limit(allowed.activations, allowed.activations, rounded)
    config = read_configuration(folder)["quantization_config"]
    is_float4 = "fp4" in str(config.get("format", ""))
    narrow = {
        f"{runtime.name} runs the whole model in bfloat16": runtime.name in ("gptqmodel", "vllm"),
        "MLX multiplies in the types of the file": runtime.name == "mlx",
        "transformers runs files of 4-bit floats in bfloat16": is_float4,
        "bitsandbytes multiplies 4-bit weights in bfloat16": bool(config.get("load_in_4bit")),
        "transformers decodes experts to bfloat16": has_experts,
    }
    if dtype == "float32" and any(narrow.values()):
        why = next(why for why, holds in narrow.items() if holds)
        return Limit(allowed.narrow, allowed.narrow, f"{why}, and the audit is in float32")
    plain = config.get("quant_method") == "compressed-tensors" and _is_symmetric(config)
    if runtime.name == "transformers" and plain and not is_float4:
        return Limit(allowed.plain, allowed.plain, "torch multiplies with the weights of the file")
    return Limit(allowed.loss, allowed.kl, "the runtime has kernels or rounding of its own")


@contextmanager
def without_bars() -> Iterator[None]:
    """Let libraries draw no progress bars: ours says where a verification is."""
    original = tqdm.__init__

    def silent(bar: Any, *arguments: Any, **options: Any) -> None:
        original(bar, *arguments, **{**options, "disable": True})

    tqdm.__init__ = silent
    try:
        yield
    finally:
        tqdm.__init__ = original


# ---------------------------------------------------------------------- beside the audit

_LOGITS = 2**27  # of one call of a model


@dataclass(frozen=True)
class AsItRuns:
    """Loss and KL divergence beside those of the audit, in nats per token, on its documents."""

    runtime: str
    policy: str
    limit: Limit
    documents: int
    audited: Interval  # of the loss
    running: Interval
    difference: Interval
    audited_kl: float | None
    running_kl: float | None

    @property
    def kl_difference(self) -> float | None:
        if self.running_kl is None or self.audited_kl is None:
            return None
        return self.running_kl - self.audited_kl

    @property
    def agrees(self) -> bool | None:
        """Return whether the loss agrees; None: the interval of its difference is too wide."""
        loss, kl = self.difference, self.kl_difference
        if kl is not None and abs(kl) > self.limit.kl:
            return False
        if max(abs(loss.low), abs(loss.high)) <= self.limit.loss:
            return True
        outside = loss.low > self.limit.loss or loss.high < -self.limit.loss
        return False if outside else None


def run(
    choice: ExportChoice,
    folder: Path,
    record: ExportRecord,
    audited: Evidence,
    runtime: Program,
    policy: Policy,
    watch: Watch,
) -> AsItRuns:
    """Run an exported folder; how far losses may differ is in the policy."""
    ready = make_ready(choice.plan, choice.options, choice.hub)
    context, limit = ready.corpus.protocol.context, pad_until([folder])
    feed = Feed((), make_batches(ready.corpus.evaluation, context, pad_until=limit))
    with _reference(choice, ready, feed, watch) as reference, without_bars():
        version_hint = "compare its version with the one in the folder's README.md"
        with (
            unreadable(f"`{runtime.name}` does not load `{folder}`", version_hint, ModelError),
            redirect_stdout(sys.stderr),  # where runtimes log; results are on stdout
        ):
            model = runtime.load(folder, ready.machine.dtype)
        hint = "export another scheme or format for it"  # whose shapes a kernel takes
        what = f"`{runtime.name}` loads `{folder}` and cannot run it"
        with unreadable(what, hint, ModelError):
            evidence = _evidence(model, reference, ready.corpus, feed, watch)
    tokens = evidence.tokens
    has_experts = any(".experts." in linear for linear in record.dense)
    return AsItRuns(
        runtime.described(record.format),
        policy.name,
        limit_of(runtime, policy.verify, folder, record.dtype, has_experts=has_experts),
        int((audited.tokens > 0).sum()),
        statistics.cross_entropy(audited.nll_sum, tokens),
        statistics.cross_entropy(evidence.nll_sum, tokens),
        statistics.absolute_change(evidence.nll_sum, audited.nll_sum, tokens),
        _mean_kl(audited),
        _mean_kl(evidence),
    )


def _mean_kl(evidence: Evidence) -> float | None:
    fidelity = evidence.fidelity
    return None if fidelity is None else float(fidelity.kl_sum.sum() / evidence.tokens.sum())


@contextmanager
def _reference(choice: ExportChoice, ready: Ready, feed: Feed, watch: Watch) -> Iterator[Tokens]:
    """Send the documents through full precision, block by block."""
    machine, subject = ready.machine, choice.subject
    with (
        opened_states(machine) as states,
        Downloads(choice.hub, (subject,)) as downloads,
        downloads.ready(subject),
    ):
        weights = open_weights(
            subject, allow_pickle=choice.options.allow_pickle, folder=downloads.folder
        )
        model, _ = Route(folder_of(subject.first), weights, machine).streamed()
        routes = RoutingWatch(feed.evaluation)
        tokens = Tokens(model, feed, states, routes)
        with torch.no_grad():
            tokens.embed(calibration=False)
            for block in model.blocks():
                watch.block(block.index, model.num_blocks, "full precision")
                tokens.evaluate(FULL_PRECISION, block)
                tokens.drop_embedded(block.index)
            watch.block(model.num_blocks, model.num_blocks, "full precision")
        yield tokens


@torch.no_grad()
def _evidence(
    model: Loaded, reference: Tokens, corpus: Corpus, feed: Feed, watch: Watch
) -> Evidence:
    tally, full = Tally(), Tally()
    for number, batch in enumerate(feed.evaluation):
        watch.count("batches", number, len(feed.evaluation))
        count, length = batch.tokens_BT.shape
        hidden_BTD = reference.states.get(f"evaluation/{FULL_PRECISION}", number)[:, :-1]
        rows = list(_compared(model, reference, batch.tokens_BT, hidden_BTD, tally))
        tally.read((count, length), _joined([row for row, _ in rows]))
        full.read((count, length), _joined([theirs for _, theirs in rows if theirs is not None]))
    return evidence_of(corpus, feed, tally, full)


def _joined(chunks: Sequence[ComparedRows]) -> dict[str, Tensor]:
    """Return all rows of a batch by name."""
    names = vars(chunks[0]) if chunks else ()
    parts = {name: [getattr(chunk, name) for chunk in chunks] for name in names}
    return {n: torch.cat(rows) for n, rows in parts.items() if all(r is not None for r in rows)}


def _compared(
    model: Loaded, reference: Tokens, tokens_BT: Tensor, hidden_BTD: Tensor, tally: Tally
) -> Iterator[tuple[ComparedRows, ComparedRows | None]]:
    step = max(1, _LOGITS // (tokens_BT.shape[1] * model.vocabulary))
    for start in range(0, len(tokens_BT), step):
        some_BT = tokens_BT[start : start + step].long()
        targets_N = some_BT[:, 1:].reshape(-1)
        logits_NV = model.predicted(some_BT).flatten(0, 1)
        if logits_NV.dim() == 1:  # losses
            yield ComparedRows(logits_NV.float()), None
            continue
        hidden_ND = hidden_BTD[start : start + step].flatten(0, 1)
        rows = reference.model.head_rows
        for first in range(0, len(targets_N), rows):  # of full precision's head, a few at a time
            chunk = slice(first, first + rows)
            full_NV = reference.model.logits(hidden_ND[None, chunk])[0].to(logits_NV.device)
            for part in row_parts(full_NV):
                theirs = Reference.of(full_NV[part], targets_N[chunk][part])
                rows_N = rows_of(tally, theirs, logits_NV[chunk][part], targets_N[chunk][part])
                yield rows_N, ComparedRows(theirs.nll_N)
