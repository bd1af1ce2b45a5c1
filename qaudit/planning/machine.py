"""The machine of an audit: its device, what the audit takes of memory and disk, what would fit.

No torch, unless there is a GPU.
"""

from __future__ import annotations

import math
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from qaudit.checkpoints.stamps import hub_cache
from qaudit.core.column_loops import PLAIN, choose
from qaudit.core.fidelity import CORE_ELEMENTS, CUDA_ELEMENTS, head_rows
from qaudit.core.scheme import Calibration, Scheme, Shipped
from qaudit.errors import MachineError, UsageError
from qaudit.formats.packing import formats
from qaudit.host import GPU_NODES, free_disk_nbytes, has_bf16_units, has_gpu_driver, shares_disk
from qaudit.planning.sizes import ROUND_TOKENS, Load, Sizes, beside_notes
from qaudit.support.lazy import torch
from qaudit.support.sizes import size, typed_size

DEVICES = ("auto", "cpu", "cuda", "mps")
_NO_MPS = "MPS has no float64, in which divergences and moments are summed"


def choose_device(device: str, dtype: str) -> tuple[str, str]:
    if device.partition(":")[0] not in DEVICES:
        raise UsageError(f"there is no device `{device}`", hint=f"one of {', '.join(DEVICES)}")
    if device == "auto":
        device = why_auto()[0]
    if dtype in ("auto", "fast"):
        on_gpu = device.startswith("cuda")
        if not on_gpu:
            has_units = dtype == "fast" and has_bf16_units()
        elif has_gpu_driver() and torch.cuda.is_available():
            has_units = torch.cuda.is_bf16_supported(including_emulation=False)
        else:  # a plan for a GPU of another machine
            has_units = True
        dtype = "bfloat16" if has_units else "float32"
    return device, dtype


def choose_audited(device: str, dtype: str) -> tuple[str, str]:
    """Return the device and dtype of an audit; refuse a device that cannot run one."""
    if device == "mps":
        raise UsageError(f"an audit cannot run on `mps`: {_NO_MPS}", hint="use `--device cpu`")
    return choose_device(device, dtype)


def why_auto() -> tuple[str, str]:
    build = _torch_build()
    if build.startswith("rocm"):
        reason = "ROCm is not tested, and is used only where `--device cuda` asks for it"
    elif build.startswith("xpu"):
        reason = "XPU is not supported"
    elif sys.platform == "darwin":
        reason = _NO_MPS if platform.machine() == "arm64" else "there is no CUDA device"
    elif not has_gpu_driver():
        reason = f"no CUDA driver: there is neither {' nor '.join(GPU_NODES)}"
    elif torch.cuda.is_available():
        return "cuda", "this torch sees a CUDA device"
    else:
        reason = "there is a CUDA driver, and this torch sees no device"
    return "cpu", reason


def device_notes(device: str) -> tuple[str, ...]:
    """Return why `auto` leaves an accelerator unused, where there is one."""
    if device != "auto":
        return ()
    chosen, reason = why_auto()
    is_unused = chosen == "cpu" and not reason.startswith(("no CUDA", "there is no"))
    return (f"computed on the CPU: {reason}",) if is_unused else ()


def choose_column_loop(device: str, schemes: Sequence[Scheme], sizes: Sizes) -> tuple[str, str]:
    """Return how GPTQ's columns are rounded, and a note; on a GPU what is proven there."""
    if not device.startswith("cuda") or not any(scheme.rounds_columns for scheme in schemes):
        return PLAIN, ""
    if not torch.cuda.is_available():
        note = "GPTQ's columns are rounded by the plain loop: the plan was made without a GPU"
        return PLAIN, note
    widths = {columns for _, columns in sizes.matrices.values()} or {sizes.hidden, sizes.widest}
    return choose(widths, torch.device(device))


def _torch_build() -> str:
    """Return the suffix of the version of torch: cu128, rocm6.4, xpu, cpu or nothing."""
    try:
        return version("torch").partition("+")[2]
    except PackageNotFoundError:
        return ""


TREE_TOKENS = 2048  # of a window of items that is a tree, unless a single sequence is longer
MASKS_NBYTES = 2**29  # of the masks of trees; what is more is made again for every block
BATCH_TOKENS = 4096  # tokens in flight through a block
MAPPED_NBYTES, MAPPED_WHILE_SPILLING = 2**25, 2**22  # blocks that the heap never keeps
MADE = 4  # numbers an mlp makes of each in its widest linear: gate, activated, up, their product
UNDER_WAY = 4  # batches of hidden states, copied from a GPU or to it beside what it computes
RETAINED = 2.2  # what the heap keeps of what stages free, in pieces: 1.3 to 2.2 were measured
SPILLED = 0.8  # the same of all stages where large blocks are given back: measured 0.6 to 0.7
KEPT = 13  # numbers in float32 that gradients keep of each that is transformed and rounded


def waiting_nbytes(tokens: int, hidden: int, widest: int, itemsize: int) -> int:
    """Estimate what a block holds while so many tokens wait inside it.

    The residual, and the operands of attention or the inner product of the mlp.
    """
    return tokens * (5 * hidden + widest) * itemsize


@dataclass(frozen=True)
class Footprint:
    """What a pass takes of memory at its worst moment, and of the disk beside downloads.

    Hidden states that memory does not hold are in the folder for temporary files. Where items of
    tasks go through in several rounds, quantized weights are kept in the output folder meanwhile.
    """

    sizes: Sizes
    load: Load
    itemsize: int
    limit_nbytes: int  # of memory for hidden states
    device: str = "cpu"

    @property
    def streams_nbytes(self) -> int:
        """What the hidden states of all streams of a round take."""
        sizes, load, calibration_tokens = self.sizes, self.load, self.load.text.calibration_tokens
        tokens = (load.streams + 1) * load.round_tokens + (load.calibrated + 1) * calibration_tokens
        nbytes = tokens * (sizes.hidden + sizes.beside) * self.itemsize
        models = 1 + len(self._files) + self._has_reference  # side by side
        nbytes += models * (load.round_tokens + calibration_tokens) * sizes.given * self.itemsize
        if any(
            scheme.compares_modules or scheme.calibration is Calibration.BOTH_STREAMS
            for scheme in load.schemes
        ):  # what every group of a block reads in full precision
            nbytes += calibration_tokens * (3 * sizes.hidden + sizes.widest) * self.itemsize
        if not load.mixes_bits:
            return nbytes
        # Before it, bits are chosen on what enters every block.
        tokens = load.round_tokens + calibration_tokens + (sizes.blocks + 1) * load.choosing_tokens
        return max(nbytes, tokens * (sizes.hidden + sizes.beside) * self.itemsize)

    @property
    def memory_nbytes(self) -> int:
        """What the engine holds at its worst moment, above the libraries themselves."""
        sizes, load, itemsize, files = self.sizes, self.load, self.itemsize, self._files
        # A file is opened with embeddings and head of its own, which are dropped where they equal
        # the base's; its block is beside the base's.
        beside = bool(files) + self._has_reference
        kinds = [formats()[file.format] for file in files if file.format in formats()]
        rests = 1 + beside + sum(kind.has_embeddings for kind in kinds)
        masks_nbytes = load.item_round_tokens * TREE_TOKENS * itemsize
        widest_nbytes, spills = sizes.widest * itemsize, self.streams_nbytes > self.limit_nbytes
        # What a batch frees on its way to where it waits is taken by smaller pieces of the next
        # one, which stay; so that the heap grows by all that each makes. Large blocks are no part
        # of the heap.
        left_inside_nbytes = 0
        mapped = MAPPED_WHILE_SPILLING if spills else MAPPED_NBYTES
        is_kept = self.device == "cpu" and BATCH_TOKENS * widest_nbytes < mapped
        if load.with_streams and is_kept and not self.returning:
            left_inside_nbytes = (MADE - 1) * widest_nbytes * load.text.calibration_tokens
        # The C library keeps what each stage frees: less once states spill.
        stages = self._stages_nbytes()
        kept_nbytes = max(stages) if spills else sum(stages)
        if self.device == "cpu":
            kept = SPILLED if spills else RETAINED
            kept_nbytes = max(max(stages), round(sum(stages) * kept))
        return (
            rests * sizes.rest_parameters * itemsize
            + (2 + beside) * sizes.block_parameters * itemsize
            + min(self.streams_nbytes, self.limit_nbytes)
            + self.copies_nbytes
            + min(MASKS_NBYTES, masks_nbytes)
            + min(self._inside_nbytes, self.limit_nbytes)
            + left_inside_nbytes
            + kept_nbytes
        )

    @property
    def _files(self) -> list[Shipped]:
        return [scheme for scheme in self.load.schemes if isinstance(scheme, Shipped)]

    @property
    def _has_reference(self) -> bool:
        return self.load.streams > len(self.load.schemes) + 1

    def _stages_nbytes(self) -> tuple[int, ...]:
        """Return the memory of each stage: quantizing, the head, a block, learning."""
        sizes, load, itemsize = self.sizes, self.load, self.itemsize
        # Experts are quantized one after another; their weights are kept as the model has them.
        together = sizes.quantized_together
        installed = (sizes.block_parameters - together) * itemsize
        quantizing = 16 * together + installed + 12 * sizes.widest**2
        if self.device != "cpu":
            group = 2 * sizes.hidden * sizes.widest
            tried = max((s.tried_weights(group) for s in load.schemes), default=0)
            quantizing = max(quantizing, installed + 12 * tried)
        head = self.head_nbytes + load.streams * BATCH_TOKENS * sizes.hidden * itemsize
        forward = 8 * BATCH_TOKENS * sizes.widest * itemsize
        # Gradients keep a block's weights, and what a mini-batch makes in it.
        read = 3 * sizes.hidden + sizes.widest
        learning = 4 * KEPT * (sizes.block_parameters + 2 * load.step_tokens * read)
        if load.mixes_bits and not sizes.experts:  # all statistics of a block, twice
            quantizing += 8 * (3 * sizes.hidden**2 + sizes.widest**2)
        if load.mixes_bits:  # logits with their gradients
            head = max(head, 16 * head_rows(sizes.vocabulary, self.device) * sizes.vocabulary)
        return quantizing, head, forward, learning * load.learns

    @property
    def head_nbytes(self) -> int:
        """Logits of all streams, and of a part of them what comparing makes in float32."""
        vocabulary = self.sizes.vocabulary
        logits = head_rows(vocabulary, self.device) * vocabulary
        part = CORE_ELEMENTS if self.device == "cpu" else CUDA_ELEMENTS
        compared = 20 * min(2 * part, logits // (self.load.streams + 1))
        files = any(isinstance(scheme, Shipped) for scheme in self.load.schemes)
        # Each file has a head of its own, and full precision's rows are kept for all of them.
        return logits * (self.itemsize + 8 * files) + compared

    @property
    def copies_nbytes(self) -> int:
        """What a GPU holds of the hidden states that are kept on the host."""
        if self.device == "cpu" or self.streams_nbytes <= self.limit_nbytes:
            return 0
        return UNDER_WAY * BATCH_TOKENS * self.sizes.hidden * self.itemsize

    @property
    def _inside_nbytes(self) -> int:
        """What waits inside a block where schemes calibrate on their own streams."""
        if not self.load.with_streams:
            return 0
        tokens, sizes = self.load.text.calibration_tokens, self.sizes
        waiting = waiting_nbytes(tokens, sizes.hidden, sizes.widest, self.itemsize)
        return waiting + tokens * sizes.beside * self.itemsize

    @property
    def returning(self) -> bool:
        """Whether calibration is too long to wait inside a block, and enters it by groups."""
        return self.device == "cpu" and self._inside_nbytes > self.limit_nbytes

    @property
    def rounds(self) -> int:
        """How many rounds of whole tasks the items go through in, about."""
        text = self.load.text
        return min(math.ceil(text.item_tokens / ROUND_TOKENS), len(text.items))

    @property
    def weights_nbytes(self) -> int:
        calibrating = sum(scheme.calibrates for scheme in self.load.schemes)
        weights = calibrating * self.sizes.blocks * self.sizes.block_parameters
        return weights * self.itemsize if self.rounds > 1 else 0

    @property
    def spilled_nbytes(self) -> int:
        return max(0, self.streams_nbytes - self.limit_nbytes)

    @property
    def disk_nbytes(self) -> int:
        return self.weights_nbytes + self.spilled_nbytes

    @property
    def notes(self) -> tuple[str, ...]:
        notes = [*beside_notes(self.sizes, self.itemsize, self.load.text.context)]
        if self.returning:
            notes.append(
                "calibration is too long to wait inside a block, and goes through each block once "
                "for every group of linears: the same numbers, slower; a larger "
                "`--set stream_memory=SIZE` avoids it"
            )
        if self.rounds > 1:
            notes.append(
                f"the items of tasks go through in about {self.rounds} rounds of "
                f"up to {self.load.item_round_tokens / 1e6:.1f} M tokens; beside downloads they "
                f"take up to {size(self.disk_nbytes)} of disk: quantized weights between rounds "
                f"{size(self.weights_nbytes)}, hidden states beyond the memory for them "
                f"{size(self.spilled_nbytes)}"
            )
        return tuple(notes)

    def refuse_short_memory(self, available: int, documents: int) -> None:
        """Refuse what memory does not hold, with the numbers that would make it fit."""
        if self.device != "cpu" or self.memory_nbytes <= available:
            return
        limit, fewer = self.what_would_fit(available, documents)
        ways = []
        if limit is not None:
            ways.append(f"`--set stream_memory={typed_size(limit, up=False)}`")
        if fewer is not None:
            ways.append(f"`--set calibration_documents={fewer}`")
        raise MachineError(
            f"this audit needs about {size(self.memory_nbytes)} of memory and {size(available)} "
            "are free",
            hint=f"it would fit with {' or with '.join(ways)}"
            if ways
            else "no value of `stream_memory` and of `calibration_documents` makes it fit: "
            "use a machine with more memory, or a shorter `--set context=N`",
        )

    def what_would_fit(self, available: int, documents: int) -> tuple[int | None, int | None]:
        """Return the largest limit on streams, and the most calibration documents, that would fit.

        Each by itself, with everything else as requested; None where it does not help.
        """
        limit = min(self.limit_nbytes, available - replace(self, limit_nbytes=0).memory_nbytes)
        while limit > 0 and replace(self, limit_nbytes=limit).memory_nbytes > available:
            limit //= 2  # streams that do not spill keep more of what stages leave behind
        fewer = range(documents - 1, 0, -max(1, documents // 1000))
        most = None
        for number in fewer:
            tokens = self.load.text.calibration_tokens * number // documents
            text = replace(self.load.text, calibration_tokens=tokens)
            if replace(self, load=replace(self.load, text=text)).memory_nbytes <= available:
                most = number
                break
        return (limit if limit > 0 else None), most

    def refuse_short_disk(self, out: Path, downloads_nbytes: int, kept_nbytes: int = 0) -> None:
        temporary = Path(tempfile.gettempdir())
        needs = {out: kept_nbytes + self.weights_nbytes, temporary: self.spilled_nbytes}
        if shares_disk(out, temporary):
            needs = {out: kept_nbytes + self.disk_nbytes}
        kept = f", weights of `--keep` {size(kept_nbytes)}" if kept_nbytes else ""
        for place, needed in needs.items():
            free = free_disk_nbytes(place)
            free -= downloads_nbytes if shares_disk(place, hub_cache()) else 0
            if needed > max(0, free):
                ways = ["fewer schemes in `--keep`, or none"] * bool(kept_nbytes and place == out)
                if self.spilled_nbytes >= needed - free:
                    more = typed_size(self.limit_nbytes + needed - free)
                    ways.append(f"`--set stream_memory={more}`")
                if self.rounds > 1:
                    largest = max(count for _, count in self.load.text.items)
                    ways.append(f"`--set task_items={max(1, largest // self.rounds)}`")
                if self.spilled_nbytes:
                    ways.append("`TMPDIR` on a larger disk")
                raise MachineError(
                    f"this audit needs up to {size(needed)} of disk in `{place}` beside downloads, "
                    f"and {size(max(0, free))} are free: quantized weights between rounds take "
                    f"{size(self.weights_nbytes)}, hidden states {size(self.spilled_nbytes)}{kept}",
                    hint=f"it may fit with {' or with '.join(ways)}",
                )
