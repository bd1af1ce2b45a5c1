"""What a format of quantized files is: how one linear is written, read back, and described.

A format packs what schemes return as stored; what it cannot hold it refuses, with what would work.

One that is written is a `Format`, of a module of this room or of another distribution by the entry
point `qaudit.formats`. One that is read is a `Reader`: a constant of a module here, the `reader` of
a format, or what the entry point of another distribution in `qaudit.readers` names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import qaudit.formats
from qaudit.checkpoints.safetensors import ShardWriter
from qaudit.core.linears import Codes, IntegerCodes, StoredWeight
from qaudit.core.mixture import any_expert
from qaudit.core.registry import discover, modules_in, schemes
from qaudit.core.scheme import NO_CACHE, Scheme
from qaudit.errors import SchemeError, SourceError, UsageError
from qaudit.formats.reading import Reader
from qaudit.settings import EXAMPLE_SCHEMES
from qaudit.support.lazy import Tensor, torch
from qaudit.support.plugins import Plugins, entries_of, loaded

Document = dict[str, Any]
Programs = Mapping[str, tuple[str, ...]]

TRANSFORMERS = """\
from transformers import AutoTokenizer, {imports}{model}

tokenizer = AutoTokenizer.from_pretrained("{place}")
model = {model}.from_pretrained("{place}", dtype="auto"{options})
inputs = tokenizer("The quick brown fox", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))"""


GPTQMODEL = """\
from gptqmodel import GPTQModel

model = GPTQModel.load("{place}")
print(model.tokenizer.decode(model.generate("The quick brown fox")[0]))"""


@dataclass(frozen=True)
class Runtime:
    """A program that loads the files, from a version on."""

    name: str
    lowest: str
    remark: str = ""


class Format:
    """Base of every format; `scheme` is what all linears were quantized by."""

    name: ClassVar[str]
    library: ClassVar[str] = "transformers"  # by which the Hub sorts and shows its files
    reader: ClassVar[Reader]
    loading: ClassVar[str] = TRANSFORMERS  # Python, or a command, that loads files from a place
    runtimes: Any = ()  # of `Runtime`; a property where the scheme decides
    config_files: ClassVar[tuple[str, ...]] = ()  # copies of the configuration that readers want
    file: ClassVar[str] = ""  # of all weights, in place of shards
    has_settings: ClassVar[bool] = True  # a configuration and a tokenizer beside the weights
    leaves_out: ClassVar[tuple[str, ...]] = ()  # dense tensors that its files may lack
    holds: ClassVar[tuple[Codes, ...]] = ()  # codes that no other format has
    has_embeddings: ClassVar[bool] = False  # quantized, as the head is
    widths: ClassVar[tuple[int, ...]] = (2, 3, 4, 5, 6, 7, 8)  # of the integers that files hold
    mixes_bits: ClassVar[bool] = False  # its files name the bits of each linear
    has_experts: ClassVar[bool] = True  # a runtime loads quantized experts of its files
    loaded_by: ClassVar[Programs] = {}
    """The programs of `verify` that load the files, and the packages that they need for it."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.mixed: Mapping[str, int] = {}  # bits of each linear, where the scheme mixes them

    def snippet(self, place: str, model: str, config: Document) -> str:
        """Return Python, or a command, that loads files from a place and writes some text.

        `model` is the class of transformers that the checkpoint is of.
        """
        return self.loading.format(place=place, model=model, imports="", options="")

    def pack(self, linear: str, stored: StoredWeight) -> dict[str, Tensor]:
        """Return the tensors of one linear, by their names in the file."""
        raise NotImplementedError

    def as_compared(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is not quantized as a reader of the files gives it."""
        return tensor

    def use(self, converter: Path | None) -> None:
        """Take what metadata come from; refuse it for a format that needs none."""
        if converter is not None:
            raise UsageError(
                f"`{self.name}` files take no metadata from llama.cpp",
                hint="leave out `--converter`, or add `--format gguf`",
            )

    def start(self, source: Path, work: Path, names: Iterable[str]) -> None:
        """Prepare what the files need besides weights, in a folder that stays for a resume."""

    def assemble(self, shards: ShardWriter, folder: Path) -> None:
        """Make the files in a folder of shards that hold all tensors as they were packed."""
        shards.finish()

    def config(self, outside: Sequence[str], symmetric: bool, dtype: str = "float32") -> Document:
        """Return the `quantization_config`; `outside` are the linears that are not quantized."""
        raise NotImplementedError

    def whole_config(self, original: Document, quantization: Document) -> Document:
        """Return `config.json`: that of the checkpoint, and what the format adds."""
        return {**original, "quantization_config": quantization}


def integer_codes(linear: str, stored: StoredWeight, form: Format) -> IntegerCodes:
    """Return integer codes that a file can hold, or refuse them with what would work."""
    scheme = form.scheme
    if not scheme.bit_class.isdecimal() or scheme.transforms_inputs:
        raise changed_inputs(scheme)
    if not isinstance(stored, IntegerCodes):
        raise SchemeError(
            f"`{scheme.short}` does not store integer codes and zero points, which `{form.name}` "
            "holds",
            hint=_elsewhere(scheme),
        )
    if stored.bits not in form.widths:
        raise unfit(
            f"`{form.name}` files have {', '.join(map(str, form.widths))} bits, and "
            f"`{scheme.short}` has {stored.bits}",
            ", which has 2 to 8",
        )
    if stored.scales_RG.dtype != torch.bfloat16:
        raise SchemeError(
            f"`{scheme.short}` has scales in float32, which a file would round: it would hold "
            "other weights than were measured",
            hint="scan and export with scale_dtype=bf16",
        )
    if not bool((torch.isfinite(stored.scales_RG) & (stored.scales_RG != 0)).all()):
        raise SourceError(
            f"`{linear}` has scales that are zero or not finite",
            hint="the checkpoint diverged or is damaged; export another one",
        )
    if stored.group_of_C is not None:
        raise SchemeError(
            f"`{scheme.short}` mixes the columns of its groups, and no current kernel for "
            f"`{form.name}` reads them so",
            hint="scan with static_groups=true, or with act_group_aware=true in place of act_order",
        )
    columns, group = stored.codes_RC.shape[1], declared_group(scheme)
    if group != -1 and (stored.group != group or columns % group):
        fitting = [size for size in (128, 64, 32) if columns % size == 0]
        raise SchemeError(
            f"groups of {group} do not fill the {columns} columns of `{linear}`, "
            f"and `{form.name}` holds full groups alone",
            hint=f"scan with {' or '.join(f'group={size}' for size in (*fitting[:1], -1))}",
        )
    return stored


def unfit(sentence: str, more: str = "") -> SchemeError:
    """Make the error for codes that compressed-tensors files hold, and those of a format do not."""
    return SchemeError(sentence, hint=f"export it as `compressed-tensors`{more}")


def changed_inputs(scheme: Scheme) -> SchemeError:
    return SchemeError(
        f"`{scheme.short}` changes what its linears read, which a file of weights leaves as it is",
        hint=_elsewhere(scheme),
    )


def _elsewhere(scheme: Scheme) -> str:
    if scheme.layout is None:
        names = [*EXAMPLE_SCHEMES.split(","), *schemes_of("integers").split(" or ")]
        return f"export one of {', '.join(names)}"
    codes, built_in = scheme.layout.codes, formats().built_in.values()
    name = next((form.name for form in built_in if codes in form.holds), "compressed-tensors")
    return f"export it as `{name}`"


def schemes_of(*codes: Codes, rounds_inputs: bool | None = None) -> str:
    built_in = schemes().built_in.values()
    kinds = [kind() for kind in built_in if "bits" not in kind.__dataclass_fields__]
    layouts = {kind.short: kind.layout for kind in kinds if kind.layout is not None}
    return " or ".join(
        short
        for short, layout in layouts.items()
        if layout.codes in codes and rounds_inputs in (None, layout.rounds_inputs)
    )


def half_scales(linear: str, stored: IntegerCodes) -> Tensor:
    """Return scales in float16, which holds those of a grid on bfloat16 exactly."""
    scales_RG = stored.scales_RG.cpu()
    half_RG = scales_RG.to(torch.float16)
    if not torch.equal(half_RG.float(), scales_RG.float()):
        raise SourceError(
            f"`{linear}` has scales from {float(scales_RG.min()):.4g} to "
            f"{float(scales_RG.max()):.4g}, and float16 does not hold all of them",
            hint="export it as `compressed-tensors`, which has scales in bfloat16",
        )
    return half_RG


def declared_group(scheme: Scheme) -> int:
    """Return the group size as a scheme's parameters say it; -1 is a whole row."""
    return int(getattr(scheme, "group", -1))


def zero_points(codes: IntegerCodes, symmetric: int) -> Tensor:
    """Return the zero points of all groups; those of symmetric codes are one number."""
    if codes.zeros_RG is not None:
        return codes.zeros_RG.cpu()
    return torch.full(codes.scales_RG.shape, symmetric, dtype=torch.uint8)


def patterns_of(mixed: Mapping[str, int]) -> dict[int, list[str]]:
    """Return for each width the patterns of its linears; experts of one width share theirs."""
    parts = {n: (m[1], m[2]) for n in mixed if (m := re.fullmatch(r".*?\.(\d+)\.(.+)", n))}
    alike: dict[tuple[str, str], set[int]] = {}
    for name, (block, linear) in parts.items():
        alike.setdefault((block, any_expert(linear)), set()).add(mixed[name])
    blocks: dict[tuple[int, str], dict[str, None]] = {}
    for name, (block, linear) in parts.items():
        shared = any_expert(linear)
        linear = shared if len(alike[block, shared]) == 1 else linear
        blocks.setdefault((mixed[name], linear), {})[block] = None
    patterns: dict[int, list[str]] = {}
    for (bits, linear), some in sorted(blocks.items()):
        text = re.escape(linear).replace(r"\.\*\.", r"\.\d+\.")
        patterns.setdefault(bits, []).append(rf".*\.({'|'.join(some)})\.{text}$")
    return patterns


@cache
def formats() -> Plugins[Format]:
    return Plugins("format", Format, discover(qaudit.formats, Format))


@cache
def readers() -> Mapping[str, Reader]:
    values = [value for module in modules_in(qaudit.formats) for value in vars(module).values()]
    values += [vars(kind).get("reader") for kind in formats().built_in.values()]
    return {reader.name: reader for reader in values if isinstance(reader, Reader)}


def reader_named(name: str) -> Reader | None:
    """Return a reader; that of another distribution is imported where a file names its format."""
    if (entry := further_readers().get(name)) is not None:
        reader: Reader = loaded("reader", entry, Reader)
        return reader
    if name in readers() or name not in formats().entries:
        return readers().get(name)
    return getattr(formats()[name], "reader", None)


def further_readers() -> Mapping[str, EntryPoint]:
    """Return the readers of other distributions."""
    return entries_of("reader", tuple(readers()))


def format_named(name: str, scheme: Scheme) -> Format:
    if name not in formats():
        raise UsageError(
            f"`{name}` is not a format that is written", hint=f"use {' or '.join(formats())}"
        )
    if scheme.kv != NO_CACHE:
        alone = replace(scheme, kv=NO_CACHE).short
        raise SchemeError(
            f"`{scheme.short}` rounds cached keys and values, which no file of weights holds",
            hint=f"export {alone}, and have the runtime round its cache",
        )
    return formats()[name](scheme)
