"""What this machine can do for a scan, found by trying, and what to install for what.

A library that is installed and does not load is a fault, not a version. The Hub gets one
request with a short timeout. Of a token only its presence is printed.
"""

from __future__ import annotations

import importlib
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil

from qaudit.checkpoints.stamps import hub_cache, own_cache
from qaudit.errors import HubError, MachineError, UnreachableError
from qaudit.host import available_nbytes, free_disk_nbytes
from qaudit.planning.machine import choose_device, why_auto
from qaudit.planning.pin import libraries
from qaudit.report.format import duration, size
from qaudit.settings import DEFAULT_SCHEMES
from qaudit.support.keys import INSTALL, install
from qaudit.support.lazy import torch

EXAMPLE_REPO = "allenai/OLMo-2-1124-7B"
FASTER = 1.5
"""A dtype is recommended from this ratio on: a run reads and waits, too."""

_SIDE = 4096  # of the matrices whose product is timed
_SEVEN_B, _TOKENS = 7e9, 131_072

_OPTIONAL = {
    "accelerate": "`verify` of bitsandbytes files",
    "compressed-tensors": "`verify` in transformers",
    "gguf": "GGUF files",
    "gptqmodel": "`verify` in GPTQModel",
    "lm_eval": "`--tasks`",
    "pandas": "tables as data frames",
    "pyarrow": "texts in parquet files",
}


@dataclass(frozen=True)
class Fact:
    """One thing that was checked; scans fail on a `fault`."""

    about: str
    name: str
    value: str
    state: Literal["ok", "without", "fault"] = "ok"
    hint: str = ""


def examine() -> tuple[Fact, ...]:
    here, free = Path.cwd(), free_disk_nbytes(hub_cache())
    disk = (
        ("shared cache", f"{hub_cache()}: {size(free)} free; `hf cache ls` lists it"),
        ("own cache", f"{own_cache()}"),
        ("here", f"{here}: {size(free_disk_nbytes(here))} free"),
    )
    return (
        *_machine(), *_libraries(), *_schemes(), *_hub(),
        *(Fact("disk", name, value) for name, value in disk),
    )  # fmt: skip


def _machine() -> Iterator[Fact]:
    about = "machine"
    yield Fact(about, "python", f"{platform.python_version()} on {platform.platform()}")
    total = psutil.virtual_memory().total
    yield Fact(about, "memory", f"{size(available_nbytes())} free of {size(total)}")
    yield Fact(about, "cores", str(psutil.cpu_count()))
    if fault := _torch_fault():
        yield fault
        return
    from qaudit.engine.tasks import open_device  # loads torch

    device, dtype = open_device(*choose_device("auto", "auto"))
    for k in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(k)
        name = torch.cuda.get_device_name(k)
        yield Fact(about, f"cuda:{k}", f"{name}, {size(free)} free of {size(total)}")
    chosen = f"{device}, in {str(dtype).removeprefix('torch.')}: {why_auto()[1]}"
    if device.type == "cuda":
        yield Fact(about, "device", chosen)
        yield _speed(device, dtype)
        return
    hint = "scans use a CUDA device by themselves, once this torch sees one"
    yield Fact(about, "device", chosen, "without", hint)
    slow, fast = (_seconds(512, each, device) for each in (torch.float32, torch.bfloat16))
    if (times := slow / fast) > FASTER:
        hint = "`--set dtype=bfloat16` is faster here, and its numbers differ from those of float32"
        yield Fact(about, "bfloat16", f"{times:.1f} times as fast as float32", "ok", hint)


def _speed(device: torch.device, dtype: torch.dtype) -> Fact:
    """Return how fast a GPU multiplies, and what that makes of an audit."""
    name = str(dtype).removeprefix("torch.")
    try:
        rate = 2.0 * _SIDE**3 / _seconds(_SIDE, dtype, device)
    except RuntimeError as error:
        hint = "use `--device cpu`, and have the device or its driver checked"
        return Fact("machine", name, f"does not run there: {_reason(error)}", "fault", hint)
    seconds = (1 + len(DEFAULT_SCHEMES)) * _TOKENS * 2 * _SEVEN_B / rate
    audit = f"forward passes of a default audit of a 7B model in {duration(seconds)}"
    return Fact("machine", name, f"{rate / 1e12:.3g} TFLOP/s: {audit}")


def _seconds(side: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return what a product of two matrices takes."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    a = torch.ones(side, side, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(4):  # the first one warms up
        wait(device)
        began = time.perf_counter()
        a @ a
        wait(device)
        best = min(best, time.perf_counter() - began)
    return best


def _torch_fault() -> Fact | None:
    try:
        importlib.import_module("torch")
    except Exception as error:  # noqa: BLE001 - a broken library raises anything
        hint = f"only what measures needs it: {INSTALL}; pip install --force-reinstall torch"
        return Fact("machine", "torch", f"does not load: {_reason(error)}", "fault", hint)
    return None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())


def _libraries() -> Iterator[Fact]:
    from qaudit.core.registry import merges, schemes

    for name, found in libraries().items():
        yield Fact("libraries", name, found)
    broken = schemes().broken()
    optional = {
        extra[0]: (f"the scheme `{name}`", f"pip install '{extra[1]}'")
        for name in schemes().keys() - broken.keys()
        if (extra := schemes()[name].extra)
    }
    optional |= {name: (use, install(name)) for name, use in _OPTIONAL.items()}
    optional["triton"] = ("the fused GPTQ kernel on a GPU", "a CUDA build of torch brings it")
    for name, (use, how) in sorted(optional.items()):
        try:
            yield Fact("libraries", name, f"{version(name)}, for {use}")
        except PackageNotFoundError:
            yield Fact("libraries", name, f"not installed; only for {use}", "without", how)
    for name, error in (broken | merges().broken()).items():
        yield Fact("libraries", name, error.message, "without", error.hint)


def _schemes() -> Iterator[Fact]:
    """Quantize one small matrix with one scheme of each kind that is installed."""
    if _torch_fault():
        return
    from qaudit.core.linears import FoldSource, Inputs, Linears
    from qaudit.core.registry import schemes

    # A linear behind a norm, and what schemes calibrate on.
    generator = torch.Generator().manual_seed(0)
    weight_RC = torch.randn(8, 256, generator=generator)
    x_TC = torch.randn(256, 256, generator=generator)
    inputs = Inputs(
        x_TC.T @ x_TC, x_TC.abs().mean(0), len(x_TC), x_TC.abs().amax(0), sample_TC=x_TC
    )
    linears = Linears(
        {"weight": weight_RC}, inputs, torch.arange(256), fold_is_norm=True,
        block_has_norm_folds=True, norm_C=torch.ones(256), fold_source=FoldSource("norm", True),
    )  # fmt: skip
    names = []
    for name in sorted(schemes().keys() - schemes().broken().keys()):
        few: dict[str, Any] = {"bits": 4, "steps": 1}
        plugin = schemes()[name]
        scheme = plugin(**{f.name: few[f.name] for f in fields(plugin) if f.name in few})
        try:
            scheme.must_be_installed()
        except MachineError:  # the library is listed above
            continue
        try:
            scheme.quantize(linears)
        except Exception as error:  # noqa: BLE001 - plug-ins raise anything
            yield Fact("schemes", name, _reason(error), "fault", "leave it out with `--schemes`")
        else:
            names.append(name)
    yield Fact("schemes", "quantize", ", ".join(names))


def _hub() -> Iterator[Fact]:
    from qaudit.hub.api import Client

    client = Client.from_environment(patient=False)
    yield Fact("hub", "endpoint", client.endpoint)
    presence = "present" if client.logged_in else "none"
    hint = "" if client.logged_in else "`hf auth login` raises the limits on shared machines"
    yield Fact("hub", "token", presence, "ok" if client.logged_in else "without", hint)
    if client.offline:
        hint = "unset `HF_HUB_OFFLINE` to download; the cache works without"
        yield Fact("hub", "reached", "not tried: this machine is set to offline", "without", hint)
        return
    try:
        client.revisions(EXAMPLE_REPO)
    except UnreachableError as error:
        hint = "local folders and the cache work without; check `HF_ENDPOINT` and proxies"
        yield Fact("hub", "reached", error.message, "without", hint)
    except HubError as error:  # it answered, if only to refuse
        yield Fact("hub", "reached", f"yes; {error.message}")
    else:
        yield Fact("hub", "reached", "yes")
