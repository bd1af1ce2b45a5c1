"""What this machine can do for an audit, found out by trying, and what to install for what.

Every line is something that was looked at or run just now: a library that is installed and
does not load is a fault, not a version. The Hub is asked one question with a short patience.
A token is said to be there or not, and nothing else is said of it.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from qaudit.checkpoints.places import hub_cache, own_cache
from qaudit.engine.machine import libraries, open_device
from qaudit.errors import HubError, QauditError, UnreachableError
from qaudit.hub.holdings import holdings, nbytes_on_disk
from qaudit.planning.device import choose_device
from qaudit.report.format import size

if TYPE_CHECKING:
    from qaudit.hub.client import Client

EXAMPLE_REPO = "allenai/OLMo-2-1124-7B"
_OPTIONAL = {
    "gptqmodel": ("--cross-check", "pip install 'qaudit-llm[gptqmodel]'"),
    "pyarrow": ("texts in parquet files", "pip install 'qaudit-llm[parquet]'"),
    "triton": ("the fused GPTQ kernel on a GPU", "a CUDA build of torch brings it"),
}


@dataclass(frozen=True)
class Fact:
    """One thing that was looked at; `fault` means that audits fail on it."""

    about: str
    name: str
    value: str
    state: Literal["ok", "without", "fault"] = "ok"
    hint: str = ""


def examine() -> tuple[Fact, ...]:
    """Look at everything."""
    return (*_machine(), *_libraries(), *_schemes(), *_hub(), *_disk())


def _machine() -> Iterator[Fact]:
    about = "machine"
    yield Fact(about, "python", f"{platform.python_version()} on {platform.platform()}")
    memory = psutil.virtual_memory()
    yield Fact(about, "memory", f"{size(memory.available)} free of {size(memory.total)}")
    yield Fact(about, "cores", str(psutil.cpu_count()))
    try:
        device, dtype = open_device(*choose_device("auto", "auto"))
    except (ImportError, OSError) as error:  # torch itself does not load
        yield Fact(about, "device", str(error), "fault", "install torch again")
        return
    chosen = f"{device.type}, in {str(dtype).removeprefix('torch.')}"
    if device.type != "cuda":
        hint = "a CUDA device is used by itself, once this torch sees one"
        yield Fact(about, "device", chosen, "without", hint)
        return
    import torch

    for k in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(k)
        name = torch.cuda.get_device_name(k)
        yield Fact(about, f"cuda:{k}", f"{name}, {size(free)} free of {size(total)}")
    yield Fact(about, "device", chosen)


def _libraries() -> Iterator[Fact]:
    for name, found in libraries().items():
        yield Fact("libraries", name, found)
    for name, (use, how) in _OPTIONAL.items():
        try:
            yield Fact("libraries", name, f"{version(name)}, for {use}")
        except PackageNotFoundError:
            yield Fact("libraries", name, f"not installed; only for {use}", "without", how)


def _schemes() -> Iterator[Fact]:
    """Quantize one small matrix with every scheme of the default set that needs no text."""
    import torch

    from qaudit.core.registry import parse_scheme
    from qaudit.core.scheme import Calibration, Linears
    from qaudit.settings import DEFAULT_SCHEMES

    linears = Linears({"weight": torch.ones(2, 64)})
    for text in DEFAULT_SCHEMES:
        scheme = parse_scheme(text)
        if scheme.calibration is not Calibration.NONE:
            continue
        try:
            scheme.quantize(linears)
        except (RuntimeError, ImportError, OSError, QauditError) as error:
            yield Fact("schemes", text, str(error), "fault", "leave it out with `--schemes`")
        else:
            yield Fact("schemes", text, "quantizes")


def _hub() -> Iterator[Fact]:
    from qaudit.hub.client import Client

    client = Client.from_environment(patient=False)
    yield Fact("hub", "endpoint", client.endpoint)
    try:
        named = "there" if client.has_token else "none"
        hint = "" if client.has_token else "`hf auth login` raises the limits on shared machines"
        yield Fact("hub", "token", named, "ok" if client.has_token else "without", hint)
        yield _reached(client)
    finally:
        client.close()


def _reached(client: Client) -> Fact:
    if client.offline:
        hint = "unset `HF_HUB_OFFLINE` to fetch; what is cached is found without"
        return Fact("hub", "reached", "not asked: this machine is set to offline", "without", hint)
    try:
        client.revisions(EXAMPLE_REPO)
    except UnreachableError as error:
        hint = "local folders and what is cached work without; see `HF_ENDPOINT` and proxies"
        return Fact("hub", "reached", error.message, "without", hint)
    except HubError as error:  # it answered, if only to refuse
        return Fact("hub", "reached", f"yes; {error.message}")
    return Fact("hub", "reached", "yes")


def _disk() -> Iterator[Fact]:
    held = holdings()
    brought = sum(holding.nbytes_brought for holding in held)
    yield Fact(
        "disk", "shared cache",
        f"{hub_cache()}: {size(nbytes_on_disk(held))}, of which {size(brought)} by qaudit, "
        f"{size(_free(hub_cache()))} free",
    )  # fmt: skip
    yield Fact("disk", "own cache", f"{own_cache()}")
    yield Fact("disk", "here", f"{Path.cwd()}: {size(_free(Path.cwd()))} free")


def _free(place: Path) -> int:
    there = next(p for p in (place, *place.parents) if p.exists())
    return shutil.disk_usage(there).free
