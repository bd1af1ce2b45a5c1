"""The formats that can be written, by name."""

from __future__ import annotations

from dataclasses import replace

from qaudit.core.plugins import Plugins
from qaudit.core.scheme import NO_CACHE, Scheme
from qaudit.errors import SchemeError, UsageError
from qaudit.export.gguf import GgufFiles
from qaudit.formats.awq import AwqFiles
from qaudit.formats.bitsandbytes import Bitsandbytes
from qaudit.formats.compressed_tensors import CompressedTensors
from qaudit.formats.gptq import GptqFiles
from qaudit.formats.mlx import MlxFiles
from qaudit.formats.packing import Format

_BUILT_IN = (CompressedTensors, GptqFiles, AwqFiles, Bitsandbytes, MlxFiles, GgufFiles)
FORMATS: Plugins[Format] = Plugins("format", Format, {one.name: one for one in _BUILT_IN})


def format_named(name: str, scheme: Scheme) -> Format:
    """Return a format for what a scheme stores; refuse a name that is none."""
    if name not in FORMATS:
        raise UsageError(
            f"`{name}` is not a format that is written", hint=f"use {' or '.join(FORMATS)}"
        )
    if scheme.kv != NO_CACHE:
        alone = replace(scheme, kv=NO_CACHE).short
        raise SchemeError(
            f"`{scheme.short}` rounds cached keys and values, which no file of weights holds",
            hint=f"export {alone}, and have the runtime round its cache",
        )
    return FORMATS[name](scheme)
