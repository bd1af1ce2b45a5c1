"""A second device on a machine without one: CPU tensors that say they are on `cuda`.

What a program sees of an accelerator is imitated: `tensor.device`, the refusal of operands on two
devices, streams and events, memory, and the places where the host waits. The CPU's kernels compute,
so that every number is the CPU's. Not imitated: order inside one stream, fragmentation, kernels of
Triton and bitsandbytes, several processes.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

WAITS = {  # what tells the host a value, so that it must wait for the device
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__format__",
    "cpu", "equal", "allclose", "nonzero", "argwhere", "masked_select", "unique", "bincount",
    "repeat_interleave", "cholesky", "inv", "solve", "eigh", "svd",
}  # fmt: skip
HOST_ONLY = {"numpy", "__array__", "__dlpack__"}
CROSSING = {"to", "cuda", "cpu", "copy_", "type_as", "__deepcopy__", "__set__"}
INDEXING = {"__getitem__", "__setitem__", "index_put_", "index_put"}
TENSOR_PROPERTIES = {"data", "grad", "T", "mT", "H", "real"}
ACTIVE: list[Any] = []
_local = threading.local()


class DeviceTensor(torch.Tensor):
    """A CPU tensor that says it is on the pretended device."""

    device = property(lambda self: self.__dict__.get("_on") or torch.device(ACTIVE[-1].type, 0))
    is_cuda = property(lambda self: self.device.type == "cuda")
    is_cpu = property(lambda self: False)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        return memo.setdefault(id(self), copy)


class Stream:
    """What a side stream wrote may be read elsewhere once something waited for it."""

    def __init__(self, device: Any = None, *, side: bool = True) -> None:
        self.side = side

    def synchronize(self) -> None:
        mode = ACTIVE[-1]
        mode.pending = {k: stream for k, stream in [*mode.pending.items()] if stream is not self}

    def wait_stream(self, stream: Stream) -> None:
        stream.synchronize()


class Event:
    """A time on a stream; waiting for it is waiting for what the stream was given before."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        self.stream, self.at = stream or current_stream(), time.perf_counter()

    def synchronize(self) -> None:
        self.stream.synchronize()

    def elapsed_time(self, end: Event) -> float:
        assert self.enable_timing and end.enable_timing
        return 1000 * (end.at - self.at)


DEFAULT = Stream(side=False)


def current_stream(device: Any = None) -> Stream:
    return getattr(_local, "stream", None) or DEFAULT


@contextmanager
def in_stream(stream: Stream | None) -> Iterator[None]:
    before, _local.stream = getattr(_local, "stream", None), stream
    yield
    _local.stream = before


class Device(TorchFunctionMode):
    """Counts by line of `package`: `waits` of the host, `uploads`, and copies between `peers`.

    `fails_at` is the number of the allocation that fails, once; `tried` how many there were.
    """

    def __init__(self, kind: str, package: str, count: int, capacity: int) -> None:
        super().__init__()
        self.type, self.package, self.count, self.capacity = kind, package, count, capacity
        self.waits, self.uploads, self.peers = Counter[str](), Counter[str](), Counter[str]()
        self.pinned = Counter[str]()  # bytes
        self.pending: dict[int, Stream] = {}  # storages that a side stream still writes
        self.held: dict[int, int] = {}
        self.allocated = self.reserved = 0  # a caching allocator gives nothing back
        self.tried, self.fails_at, self.synchronized = 0, 0, 0
        self.allocates: Callable[[], object] = lambda: None  # called at every allocation

    def line(self) -> str:
        frame = sys._getframe(2)
        while frame is not None and self.package not in frame.f_code.co_filename:
            frame = frame.f_back
        name = frame.f_code.co_filename.rpartition(self.package)[2] if frame else "?"
        return f"{name}:{frame.f_lineno}" if frame else name

    def place(self, device: Any) -> torch.device | None:
        """Return a pretended device with its ordinal, or None for another."""
        if not isinstance(device, str | torch.device) or torch.device(device).type != self.type:
            return None
        device = torch.device(device)
        if (device.index or 0) >= self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({device})")
        return torch.device(self.type, device.index or 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            owner = getattr(getattr(func, "__self__", None), "__name__", "")
            if owner not in TENSOR_PROPERTIES:
                return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return self._call(func, name, args, dict(kwargs or {}))

    def _call(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [*tensors_in((args, kwargs))]
        here = [t for t in tensors if isinstance(t, DeviceTensor)]
        if name == "_has_compatible_shallow_copy_type" and here:  # modules then make new parameters
            return len(here) == len(tensors)
        target = self._target(name, args, kwargs, here)
        self._check(name, args, tensors, here, target)
        if name == "pin_memory":
            self.pinned[self.line()] += args[0].nbytes
            pinned = args[0].clone()
            pinned._pinned = True
            return pinned
        out = self._compute(func, name, args, kwargs, widen=bool(here))
        if target is None:
            return (
                _plain(out).clone() if isinstance(out, DeviceTensor) and name != "__set__" else out
            )
        if isinstance(out, torch.Tensor):
            made = self._wrap(out, target, tensors)
        else:
            made = tree_map_only(torch.Tensor, lambda t: self._wrap(t, target, tensors), out)
        if self.pending:
            self._must_be_written(name, here, [*tensors_in(made)])
        return made

    def _compute(self, func: Any, name: str, args: Any, kwargs: Any, *, widen: bool) -> Any:
        """Let the CPU do it."""
        if widen and name == "mm" and "out_dtype" in kwargs:  # only CUDA has it
            wide = kwargs.pop("out_dtype")
            args = tuple(factor.to(wide) for factor in args)
        kwargs.pop("non_blocking", None)
        if self.place(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if name == "to":
            args = (args[0], *("cpu" if self.place(value) else value for value in args[1:]))
        if type(func).__module__ == "torch._ops":  # operators of other libraries
            args, kwargs = tree_map_only(DeviceTensor, _plain, (args, kwargs))
        return func(*args, **kwargs) if name != "cuda" else args[0].clone()

    def _target(self, name: str, args: Any, kwargs: Any, here: Any) -> torch.device | None:
        """Return where the result is; None: on the host, or as it comes."""
        if name in ("cpu", "__set__"):
            return None
        beside = name in ("to", "type_as") and args[1:] and isinstance(args[1], torch.Tensor)
        if beside or name in ("copy_", *INDEXING):
            like = args[1] if beside else args[0]
            return like.device if isinstance(like, DeviceTensor) else None
        values = args[1:] if name == "to" else [self.type] * (name == "cuda")
        wanted = [v for v in (kwargs.get("device"), *values) if isinstance(v, str | torch.device)]
        return self.place(wanted[0]) if wanted else here[0].device if here else None

    def _check(self, name: str, args: Any, tensors: Any, here: Any, target: Any) -> None:
        """Count what waits or is copied, and refuse operands on two devices."""
        pageable = not all(t.is_meta or getattr(t, "_pinned", False) for t in tensors)
        if target and (name == "tensor" or (name in ("to", "cuda") and not here and pageable)):
            self.uploads[self.line()] += 1
        if not here:
            return
        if name in WAITS or (name == "to" and target is None):
            self.waits[self.line()] += 1
        if name == "to" and target is not None and target != here[0].device:
            self.peers[self.line()] += 1
        if name in HOST_ONLY:
            raise TypeError(f"can't convert {here[0].device} device type tensor to numpy")
        if name in INDEXING:
            indices = args[1] if isinstance(args[1], tuple | list) else (args[1],)
            masks = [index for index in indices if getattr(index, "dtype", None) is torch.bool]
            self.waits.update([self.line()] * len(masks))
        if name in CROSSING:
            return
        if name in INDEXING and isinstance(args[0], DeviceTensor):  # indices may be on the host
            tensors = [args[0], *(t for t in args[2:] if isinstance(t, torch.Tensor))]
        counted = [t for t in tensors if isinstance(t, DeviceTensor) or (t.dim() and not t.is_meta)]
        places = {t.device for t in counted}
        if len(places) > 1:
            named = " and ".join(sorted(map(str, places)))
            raise RuntimeError(
                f"`{name}` at {self.line()}: Expected all tensors to be on the same device, "
                f"but found {named}"
            )

    def _wrap(self, t: torch.Tensor, on: torch.device, operands: Any) -> torch.Tensor:
        if t.is_meta:
            return t
        if self.type == "mps" and t.dtype == torch.float64:
            raise TypeError(f"MPS has no float64 (at {self.line()})")
        if not isinstance(t, DeviceTensor):
            t = t.clone() if any(t is operand for operand in operands) else t
            t = t.as_subclass(DeviceTensor)
        elif on != t.device:  # a copy to another ordinal
            t = _plain(t).clone().as_subclass(DeviceTensor)
        t.__dict__["_on"] = on
        storage = t.untyped_storage()
        if storage.data_ptr() not in self.held:
            self._allocate(storage)
        return t

    def _allocate(self, storage: Any) -> None:
        key, nbytes = storage.data_ptr(), storage.nbytes()
        self.tried += 1
        self.allocates()
        if self.tried == self.fails_at or self.allocated + nbytes > self.capacity:
            raise torch.OutOfMemoryError(f"CUDA out of memory (at {self.line()})")
        self.held[key] = nbytes
        self.allocated += nbytes
        self.reserved = max(self.reserved, self.allocated)
        weakref.finalize(storage, self._free, key)
        if current_stream().side:
            self.pending[key] = current_stream()

    def _free(self, key: int) -> None:
        self.allocated -= self.held.pop(key, 0)
        self.pending.pop(key, None)

    def _must_be_written(self, name: str, here: Any, made: Any) -> None:
        """Refuse to compute with what another stream may still write; views and shapes may be."""
        read = {t.untyped_storage().data_ptr() for t in here}
        fresh = {t.untyped_storage().data_ptr() for t in made} - read
        late = [k for k in read if self.pending.get(k) not in (None, current_stream())]
        if late and (fresh or name in WAITS or name.endswith("_")):
            raise RuntimeError(f"`{name}` at {self.line()} reads what another stream still writes")

    def synchronize(self, device: Any = None) -> None:
        self.synchronized += 1
        self.pending.clear()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of what a function is given; `tree_leaves` takes several times as long."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)


def _plain(t: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(torch.Tensor)


@contextmanager
def pretended(
    kind: str = "cuda", *, package: str = "qaudit/", count: int = 2, capacity: int = 80 << 30
) -> Iterator[Device]:
    """Give this process a second device for a `with` body, and to threads that start in it."""
    with suppress(ImportError):
        import bitsandbytes  # noqa: F401 - it looks for a CUDA build when it is imported
    mode, start = Device(kind, package, count, capacity), threading.Thread._bootstrap_inner

    def bootstrap(thread: threading.Thread) -> None:
        with mode:
            start(thread)

    cuda = {
        "is_available": lambda: kind == "cuda",
        "device_count": lambda: count,
        "Stream": Stream,
        "Event": Event,
        "stream": in_stream,
        "current_stream": current_stream,
        "synchronize": mode.synchronize,
        "mem_get_info": lambda device=None: (capacity - mode.reserved, capacity),
        "memory_allocated": lambda device=None: mode.allocated,
        "memory_reserved": lambda device=None: mode.reserved,
        "max_memory_allocated": lambda device=None: mode.reserved,
        "empty_cache": lambda: setattr(mode, "reserved", mode.allocated),
        "get_device_name": lambda device=None: "pretended",
        "is_bf16_supported": lambda **_: True,
        "device_of": lambda t: nullcontext(),
    }
    ACTIVE.append(mode)
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        available = mock.patch.object(torch.backends.mps, "is_available", lambda: kind == "mps")
        stack.enter_context(available)
        stack.enter_context(mock.patch.object(threading.Thread, "_bootstrap_inner", bootstrap))
        stack.enter_context(mode)
        yield mode
    ACTIVE.remove(mode)
