"""One hash of each linear that a scheme made: of the weight that its codes and scales decode to.

What is not quantized has one hash together.

An export compares what it writes with these hashes, and `verify` what it reads. Columns that a
scheme scaled by powers of two are hashed as a file holds them: scaled, and the rows of an earlier
linear that take the scales divided by them. On one device and in one dtype hashes do not change.

On a GPU, threads copy and hash while the next linears are computed; few at a time, for each holds
its weight.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from qaudit.core.linears import Linears, Quantized
from qaudit.core.scheme import Scheme
from qaudit.model.routes import Weights
from qaudit.types import digest

_AT_ONCE = 4


def sha256_of(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(
        f"{str(plain.dtype).removeprefix('torch.')}{list(plain.shape)}".encode()
    )
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def rest_names(
    names: Callable[[int, str], str], stored: Sequence[str], linears: Collection[str]
) -> list[str]:
    """Return the stored tensors that hold none of `linears`, which are named `BLOCK.NAME`.

    Experts that are stored in one tensor have no name of their own: these tensors are told by how
    they end.
    """
    places = [linear.split(".", 1) for linear in linears]
    quantized = {names(int(block), f"{name}.weight") for block, name in places}
    joined = {match[1] for match in map(_EXPERT.fullmatch, linears) if match}
    ends = tuple(f".{owner}.{role}{dot}" for owner in joined for role in _JOINED for dot in _ENDS)
    return [name for name in stored if name not in quantized and not name.endswith(ends or ("\0",))]


_EXPERT = re.compile(r"\d+\.(.*experts)\.\d+\.(?:gate|up|down)_proj")
_JOINED, _ENDS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj"), ("", ".weight")


def rest_sha256(weights: Weights, names: Sequence[str]) -> str:
    return digest(sorted((name, sha256_of(weights.read(name))) for name in names))


class LinearHashes:
    """The hashes of one pass, by scheme and by `BLOCK.NAME` of a linear."""

    def __init__(self) -> None:
        self._hashes: dict[str, dict[str, Future[str]]] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, "hash")
        self._waiting: list[Future[str]] = []
        self._written: dict[tuple[str, str], Tensor] = {}  # what may yet be divided, of this block
        self._block = 0

    def __enter__(self) -> LinearHashes:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def of(self, spec: str) -> dict[str, str]:
        return {name: hashed.result() for name, hashed in self._hashes.get(spec, {}).items()}

    def kept(self) -> dict[str, dict[str, str]]:
        """Return all hashes so far, between two blocks."""
        return {spec: self.of(spec) for spec in self._hashes}

    def restore(self, kept: Mapping[str, Mapping[str, str]]) -> None:
        """Take hashes of blocks before the present one."""
        for spec, hashes in kept.items():
            for name, sha256 in hashes.items():
                hashed: Future[str] = Future()
                hashed.set_result(sha256)
                self._hashes.setdefault(spec, {})[name] = hashed

    def observe(self, scheme: Scheme, linears: Linears, quantized: Quantized) -> None:
        if linears.block != self._block:
            self._block = linears.block
            self._written.clear()
        exact = getattr(scheme, "exact_fold", False)
        scale_C = quantized.column_scale_C if exact else None
        if scale_C is not None:
            self._divide(scheme, linears, scale_C)
        for name, weight_RC in quantized.weights.items():
            if scale_C is not None:
                weight_RC = weight_RC * scale_C.to(weight_RC.dtype)
            self._put(scheme.spec, name, weight_RC, keep=exact)

    def _divide(self, scheme: Scheme, linears: Linears, scale_C: Tensor) -> None:
        """Hash an earlier linear again, whose rows take the scales of these columns."""
        source, fold_C = linears.fold_source, linears.fold_C
        if source is None or fold_C is None or source.is_norm:
            return
        weight_RC = self._written.get((scheme.spec, source.name))
        if weight_RC is not None:
            rows = source.offset + fold_C.to(weight_RC.device)
            divided_RC = weight_RC.clone()
            divided_RC[rows] = weight_RC[rows] / scale_C[:, None].to(weight_RC)
            self._put(scheme.spec, source.name, divided_RC, keep=True)

    def _put(self, spec: str, name: str, weight_RC: Tensor, *, keep: bool) -> None:
        if keep:
            self._written[spec, name] = weight_RC
        while len(self._waiting) >= _AT_ONCE:
            self._waiting.pop(0).result()
        hashed = self._threads.submit(_copied(weight_RC))
        self._waiting.append(hashed)
        self._hashes.setdefault(spec, {})[f"{self._block}.{name}"] = hashed


def _copied(weight: Tensor) -> Callable[[], str]:
    """Return a function that hashes a tensor; a GPU's is copied beside its next computation."""
    if not weight.is_cuda:
        return lambda: sha256_of(weight)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(weight.device))

    def hashed() -> str:
        ready.synchronize()  # of this thread alone
        with torch.cuda.stream(torch.cuda.Stream(weight.device)):
            return sha256_of(weight)

    return hashed
