"""A second device on a machine without one: CPU tensors that say they are on `cuda`.

What a program sees of an accelerator is imitated: `tensor.device`, the refusal of operands on two
devices, streams and events, memory, and the places where the host waits. The CPU's kernels compute,
so that every number is the CPU's. Not imitated: fragmentation, kernels of Triton and bitsandbytes,
several processes.

The stream that computes does so at once. A side stream is a queue: what is entered there runs only
when something waits for it. What nothing orders comes out worst: reading what is not written yet,
or memory that was given back, reads NaN, and memory that is given back while another
stream may still use it spoils what is written there next.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
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
ACTIVE = []
_local = threading.local()


class DeviceTensor(torch.Tensor):
    """A CPU tensor that says it is on the pretended device."""

    device = property(lambda self: self.__dict__.get("_on") or torch.device(ACTIVE[-1].type, 0))
    is_cuda = property(lambda self: self.device.type == "cuda")
    is_cpu = property(lambda self: False)

    def record_stream(self, stream):
        ACTIVE[-1].record(self, stream)

    def __deepcopy__(self, memo):
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        return memo.setdefault(id(self), copy)


class Stream:
    """A queue of copies; what was entered runs when something waits for it.

    `seen` is the time of the computing stream up to which it has waited.
    """

    def __init__(self, device=None, *, side=True):
        self.side, self.seen, self.spoiled = side, 0, 0
        self.queue = []
        self.ran = 0
        self.kept = []  # storages until the queue has come so far
        if side:
            ACTIVE[-1].streams.append(self)

    def run(self, until):
        with _running, torch._C.DisableTorchFunction():
            while self.ran < until:
                entered, self.queue[self.ran] = self.queue[self.ran], None
                self.ran += 1
                entered()
            self.kept = [(place, storage) for place, storage in self.kept if place > self.ran]

    def synchronize(self):
        self.run(len(self.queue))
        ACTIVE[-1].reached = max(ACTIVE[-1].reached, self.seen)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        if event.stream is None or ACTIVE[-1].is_left_out("wait_event"):
            return
        if not self.side:
            event.stream.run(event.place)
            return
        self.seen = max(self.seen, event.seen)
        self.queue.append(lambda: event.stream.run(event.place))


class Event:
    """A time on a stream; waiting for it is waiting for what the stream was given before."""

    def __init__(self, *, enable_timing=False):
        self.enable_timing, self.stream = enable_timing, None

    def record(self, stream=None):
        self.at = time.perf_counter()
        if self.enable_timing or not ACTIVE[-1].is_left_out("record"):
            self.stream = stream or current_stream()
            self.place = len(self.stream.queue)
            self.seen = self.stream.seen if self.stream.side else ACTIVE[-1].time

    def synchronize(self):
        if self.stream is not None:
            self.stream.run(self.place)
            ACTIVE[-1].reached = max(ACTIVE[-1].reached, self.seen)

    def elapsed_time(self, end):
        assert self.enable_timing and end.enable_timing
        return 1000 * (end.at - self.at)


DEFAULT = Stream(side=False)
_running = threading.RLock()


def current_stream(device=None):
    return getattr(_local, "stream", None) or DEFAULT


@contextmanager
def in_stream(stream):
    before, _local.stream = getattr(_local, "stream", None), stream
    try:
        yield
    finally:
        _local.stream = before


class Device(TorchFunctionMode):
    """Counts by line of `package`: `waits` of the host, `uploads`, and copies between `peers`.

    `fails_at` is the number of the allocation that fails, once; `tried` how many there were.
    `ordering` are the lines that order streams, and `left_out` is one that is to do nothing.
    """

    def __init__(self, kind, package, count, capacity):
        super().__init__()
        self.type, self.package, self.count, self.capacity = kind, package, count, capacity
        self.waits, self.uploads, self.peers = Counter[str](), Counter[str](), Counter[str]()
        self.pinned = Counter[str]()  # bytes
        self.time = self.reached = 0  # of the computing stream: entered, and known to be over
        self.computes = False  # rather than the host
        self.streams = []
        self.ordering = set()
        self.left_out = None
        self.held = {}
        self.owners = {}  # storages that a side stream allocated
        self.written = {}  # by storage, when the computing stream wrote it last
        self.used = {}  # when it used last what a side stream allocated
        self.recorded = set()  # those that wait for it when they are given back
        self.late = []  # what was given back: until when it is used, bytes
        self.allocated = self.reserved = 0  # a caching allocator gives nothing back
        self.tried, self.fails_at, self.synchronized = 0, 0, 0
        self.allocates = lambda: None  # called at every allocation

    def line(self, depth=2):
        frame = sys._getframe(depth)
        while frame is not None and self.package not in frame.f_code.co_filename:
            frame = frame.f_back
        name = frame.f_code.co_filename.rpartition(self.package)[2] if frame else "?"
        return f"{name}:{frame.f_lineno}" if frame else name

    def is_left_out(self, name):
        """Note a line that orders streams; return whether it is to do nothing."""
        site = (name, self.line(3))
        self.ordering.add(site)
        return site == self.left_out

    def place(self, device):
        """Return a pretended device with its ordinal, or None for another."""
        if not isinstance(device, str | torch.device) or torch.device(device).type != self.type:
            return None
        device = torch.device(device)
        if (device.index or 0) >= self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal ({device})")
        return torch.device(self.type, device.index or 0)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            owner = getattr(getattr(func, "__self__", None), "__name__", "")
            if owner not in TENSOR_PROPERTIES:
                return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return self._call(func, name, args, dict(kwargs or {}))

    def _call(self, func, name, args, kwargs):
        tensors = tensors_in((*args, *kwargs.values()))
        here = [t for t in tensors if isinstance(t, DeviceTensor)]
        if name == "_has_compatible_shallow_copy_type" and here:  # modules then make new parameters
            return len(here) == len(tensors)
        target = self._target(name, args, kwargs, here)
        is_blocking = not kwargs.get("non_blocking")
        self._count(name, args, tensors, here, target, is_blocking=is_blocking)
        self._check(name, args, tensors, here)
        if name == "pin_memory" or kwargs.pop("pin_memory", False):
            return self._pin(args[0] if name == "pin_memory" else func(*args, **kwargs))
        if current_stream().side and (here or target):
            return self._enter(func, name, args, kwargs, target, tensors)
        self._note_use(name, args, here)
        self.computes = bool(here) or target is not None
        out = self._compute(func, name, args, kwargs, widen=bool(here))
        self.computes = False
        if target is None:
            is_there = isinstance(out, DeviceTensor) and name != "__set__"
            return _plain(out).clone() if is_there else out
        if isinstance(out, torch.Tensor):
            return self._wrap(out, target, tensors)
        return tree_map_only(torch.Tensor, lambda t: self._wrap(t, target, tensors), out)

    def _pin(self, tensor):
        if getattr(tensor, "_pinned", False):
            return tensor
        self.pinned[self.line()] += tensor.nbytes
        pinned = tensor.clone()
        pinned._pinned = True
        return pinned

    def _note_use(self, name, args, here):
        """Note when the computing stream uses what others allocated, and changes a tensor."""
        self.time += 1
        if self.owners and not name.startswith("empty"):
            self.used |= {key: self.time for t in here if (key := _key(t)) in self.owners}
        is_changed = name == "__setitem__" or (name.endswith("_") and name[:2] != "__")
        if is_changed and args and isinstance(args[0], DeviceTensor):
            self.written[_key(args[0])] = self.time

    def _enter(self, func, name, args, kwargs, target, tensors):
        """Put a copy in the queue of a side stream; what it writes is poison until it runs."""
        stream = current_stream()
        seen = max(stream.seen, self.reached)
        borrowed = tree_map_only(
            DeviceTensor, lambda t: _Late(self._borrow(t, stream, seen)), (args, kwargs)
        )

        def compute():
            now, options = tree_map_only(_Late, lambda late: late.read(), borrowed)
            return self._compute(func, name, now, dict(options), widen=True)

        if target is None and name != "copy_":  # the host waits for it
            stream.synchronize()
            return compute().clone()
        out = args[0]
        if name != "copy_":
            out = self._compute(func, name, args, dict(kwargs), widen=True)
            if not isinstance(out, torch.Tensor):  # a length, say, which waits for nothing
                return out
            is_view = any(_key(out) == _key(t) for t in tensors if isinstance(t, DeviceTensor))
            out = self._wrap(out, target, tensors)
            if is_view:
                return out
        is_spoiled = target is not None and stream.spoiled > seen
        into = _plain(out)
        _poison(into)
        if not is_spoiled:
            stream.queue.append(lambda: into.copy_(compute()))
        return out

    def _borrow(self, t, stream, seen):
        """Return what reads an operand of a side stream when it runs."""
        plain, key = _plain(t), _key(t)
        if self.owners.get(key) is stream:
            return lambda: plain
        where = plain.storage_offset(), plain.shape, plain.stride()
        nothing, storage = plain.new_empty(0), weakref.ref(plain.untyped_storage())
        is_early = self.written.get(key, 0) > seen

        def read():
            held = storage()
            if is_early or held is None:
                return _poison(nothing.new_empty(where[1]))
            return nothing.new_empty(0).set_(held, *where)

        return read

    def record(self, t, stream):
        """Keep memory that is given back until another stream has come so far."""
        if self.is_left_out("record_stream"):
            return
        if not stream.side:
            self.recorded.add(_key(t))
        elif len(stream.queue) > stream.ran:
            stream.kept.append((len(stream.queue), t.untyped_storage()))

    def _compute(self, func, name, args, kwargs, *, widen):
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

    def _target(self, name, args, kwargs, here):
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

    def _count(self, name, args, tensors, here, target, *, is_blocking):
        """Count what waits or is copied."""
        pageable = not all(t.is_meta or getattr(t, "_pinned", False) for t in tensors)
        if target and (name == "tensor" or (name in ("to", "cuda") and not here and pageable)):
            self.uploads[self.line()] += 1
        if not here:
            return
        if name in WAITS or (name in ("to", "copy_") and target is None and is_blocking):
            self._wait()
        if name == "to" and target is not None and target != here[0].device:
            self.peers[self.line()] += 1
        for index in _indices(args) if name in INDEXING else ():
            if getattr(index, "dtype", None) is torch.bool:
                self._wait()

    def _check(self, name, args, tensors, here):
        """Refuse operands on two devices."""
        if not here:
            return
        if name in HOST_ONLY:
            raise TypeError(f"can't convert {here[0].device} device type tensor to numpy")
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

    def _wait(self):
        self.waits[self.line(3)] += 1
        if not current_stream().side:
            self.reached = self.time

    def _wrap(self, t, on, operands):
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

    def _allocate(self, storage):
        key, nbytes = storage.data_ptr(), storage.nbytes()
        self.tried += 1
        self.allocates()
        over = [entry for entry in self.late if entry[0] <= self.reached]
        self.late = [entry for entry in self.late if entry not in over]
        self.allocated += nbytes - sum(freed for _, freed in over)
        if self.tried == self.fails_at or self.allocated > self.capacity:
            self.allocated -= nbytes
            raise torch.OutOfMemoryError(f"CUDA out of memory (at {self.line()})")
        self.held[key] = nbytes
        self.reserved = max(self.reserved, self.allocated)
        weakref.finalize(storage, self._free, key)
        if current_stream().side:
            self.owners[key] = current_stream()
        else:
            self.written[key] = self.time

    def _free(self, key):
        """Give memory back, to the stream that allocated it."""
        nbytes, used = self.held.pop(key, 0), self.used.pop(key, 0)
        owner, is_recorded = self.owners.pop(key, DEFAULT), key in self.recorded
        self.written.pop(key, None)
        self.recorded.discard(key)
        is_used = owner.side and used > max(owner.seen, self.reached)
        if is_used and is_recorded:
            self.late.append((used, nbytes))
            return
        self.allocated -= nbytes
        if is_used:
            owner.spoiled = max(owner.spoiled, used)

    def synchronize(self, device=None):
        self.synchronized += 1
        self.reached = self.time
        for stream in self.streams:
            stream.run(len(stream.queue))


@dataclass(frozen=True, eq=False)
class _Late:
    """What reads an operand when its stream has come so far."""

    read: Callable[[], torch.Tensor]


def _indices(args):
    return args[1] if isinstance(args[1], tuple | list) else args[1:2]


def _key(t):
    return t.untyped_storage().data_ptr()


def _poison(t):
    return t.fill_(float("nan") if t.is_floating_point() else 0)


def tensors_in(values):
    """Return the tensors among values and in them; `tree_leaves` takes ten times as long."""
    tensors = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors += tensors_in(value)
        elif isinstance(value, dict):
            tensors += tensors_in(value.values())
    return tensors


def _plain(t):
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(torch.Tensor)


@contextmanager
def pretended(kind="cuda", *, package="qaudit/", count=2, capacity=80 << 30):
    """Give this process a second device for a `with` body, and to threads that start in it."""
    with suppress(ImportError):
        import bitsandbytes  # noqa: F401 - it looks for a CUDA build when it is imported
    mode, start = Device(kind, package, count, capacity), threading.Thread._bootstrap_inner

    def bootstrap(thread):
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
        "reset_peak_memory_stats": lambda device=None: setattr(mode, "reserved", mode.allocated),
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
