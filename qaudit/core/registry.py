"""A plug-in's text form and its object: `gptq-4bit:group=64` <-> `Gptq(bits=4, group=64)`.

Every class in a module of `core/schemes/` and `core/merges/` is registered; diagnostics share the
syntax and have a registry of their own (`diagnostics/diagnostic.py`). A text is a name, for schemes
with bits optionally `-Nbit`, then parameters separated by colons, because commas separate schemes
and a shell leaves both alone:

    gptq-4bit    gptq-4bit:group=64    gptq:bits=4:group=64    gptq-4bit:preset=paper-a

The last is shown as `gptq-4bit (paper-a)`, which is read, too.

What has a default may be left out; what is unknown, given twice, of the wrong type or out of
range is refused with a hint. A preset expands to its parameters, and explicit ones win. For
every scheme `parse_scheme(scheme.spec) == scheme == parse_scheme(scheme.short)`.

Nothing here imports torch: the recipe, the plan and every judge of saved audits need names.
"""

from __future__ import annotations

import difflib
import importlib
import math
import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

import qaudit.core.merges
import qaudit.core.schemes
from qaudit.core.merge import Merge
from qaudit.core.scheme import Scheme, Shipped
from qaudit.errors import SchemeError
from qaudit.settings import DEFAULT_SCHEMES, EXAMPLE_SCHEMES
from qaudit.support.plugins import Plugins, entries_of, plugin_at
from qaudit.types import Plugin

SETS: Mapping[str, tuple[str, ...]] = {
    "ship-2026": (
        "fp8", "int8", "nvfp4", "nvfp4a16", "mxfp4a16", "gptq-4bit", "awq-4bit", "bnb-nf4",
        "gguf-q8_0", "gguf-q4_k_m", "gguf-q4_0",
    ),
    "paper-a": ("gptq-4bit:preset=paper-a", "gptq-3bit:preset=paper-a"),
    "paper-b": ("rtn:preset=paper-b", "rtn:preset=paper-b-int8"),
    "w4a4": (
        "nvfp4", "mxfp4", "mr-gptq", "quarot-rtn-4bit:rotate=false", "quarot-rtn-4bit",
        "quarot-4bit", "duquant-4bit", "atom-4bit", "quik-4bit", "flatquant-4bit",
        "spinquant-4bit", "ostquant-4bit", "base-q-w4a4",
    ),
}  # fmt: skip
"""Sets of schemes that `--schemes` takes by one name. Here and in `settings.DEFAULT_SCHEMES` alone
schemes are named outside their own files."""

INSTEAD = {
    "auto-gptq": "AutoGPTQ is archived; its algorithm is built in, as `gptq-4bit`",
    "auto-awq": "AutoAWQ is archived; its algorithm is built in, as `awq-4bit`",
    "bitsandbytes": "use `bnb-nf4`, `bnb-fp4` or `bnb-int8`",
    "bnb": "use `bnb-nf4`, `bnb-fp4` or `bnb-int8`",
    "fp": "full precision is always measured; leave it out",
}
"""Hints for names of libraries and of schemes that are not here."""

P = TypeVar("P")

NO_SCHEME = "none"
"""In place of schemes: shipped files alone are measured."""


@cache
def schemes() -> Plugins[Scheme]:
    return Plugins("scheme", Scheme, discover(qaudit.core.schemes, Scheme))


@cache
def merges() -> Plugins[Merge]:
    return Plugins("merge", Merge, discover(qaudit.core.merges, Merge))


def origins(
    schemes_: Iterable[Scheme | type[Scheme]], merges_: Iterable[str | None] = ()
) -> tuple[Plugin, ...]:
    """Return the plug-ins of other distributions among schemes and files, and merges as texts."""
    plugins = [schemes().origin(scheme.name) for scheme in schemes_]
    parts = [part for text in merges_ if text is not None for part in text.split(":")]
    plugins += [merges().origin(part) for part in parts]
    files = [scheme.format for scheme in schemes_ if isinstance(scheme, Shipped)]
    for kind in ("format", "reader"):
        entries = entries_of(kind, ())
        plugins += [plugin_at(kind, entries[name]) for name in files if name in entries]
    return tuple(dict.fromkeys(plugin for plugin in plugins if plugin is not None))


_PRESET = re.compile(r"(\S+) \(([\w.-]+)\)")  # as names are shown


def parse_scheme(text: str) -> Scheme:
    head, *pairs = text.strip().split(":")
    if (preset := _PRESET.fullmatch(head)) is not None:
        head, pairs = preset[1], [*pairs, f"preset={preset[2]}"]
    name, bits = split_bits(head)
    if name == Shipped.name:  # as a plan wrote it
        return build(Shipped, name, read_pairs(pairs))
    if name not in schemes():
        raise unknown("scheme", head, [*short_forms(), *scheme_sets()], schemes())
    explicit = read_pairs(pairs)
    if bits is not None:
        if not _takes_bits(schemes()[name]):
            raise unknown("scheme", head, short_forms(), schemes())
        if "bits" in explicit:
            raise SchemeError(f"`{text}` gives bits twice", hint=f"write `{name}-{bits}bit`")
        explicit["bits"] = bits
    return build(schemes()[name], name, explicit)


def parse_schemes(texts: Iterable[str]) -> tuple[Scheme, ...]:
    """Read lists of schemes and sets separated by commas, in order, refusing one named twice."""
    parsed: dict[str, Scheme] = {}
    named: set[str] = set()  # by themselves; sets may overlap
    given = [text for text in map(str.strip, ",".join(texts).split(",")) if text]
    if given == [NO_SCHEME]:
        return ()
    for text in given:
        if text in scheme_sets():
            parsed |= {s.spec: s for s in map(parse_scheme, scheme_sets()[text])}
            continue
        scheme = parse_scheme(text)
        if scheme.spec in named:
            raise SchemeError(f"`{scheme.short}` is named twice", hint="name each scheme once")
        named.add(scheme.spec)
        parsed[scheme.spec] = scheme
    if not parsed:
        raise SchemeError("no scheme is named", hint=f"for example `{EXAMPLE_SCHEMES}`")
    return tuple(parsed.values())


@cache
def scheme_sets() -> Mapping[str, tuple[str, ...]]:
    """Return the schemes of each set that `--schemes` takes; those of others have no set."""
    built_in = schemes().built_in
    every = tuple(
        name if bits is None else f"{name}-{bits}bit"
        for name, plugin in built_in.items()
        if plugin.any_model and not plugin.mixes_bits
        for bits in ((4, 3) if _takes_bits(plugin) else (None,))
    )
    gguf = tuple(name for name, plugin in built_in.items() if plugin.mixes_types)
    return MappingProxyType({"default": DEFAULT_SCHEMES, **SETS, "gguf": gguf, "all": every})


def parse_merge(text: str) -> Merge:
    name, *pairs = text.strip().split(":")
    if name not in merges():
        raise unknown("merge", name, list(merges()))
    return build(merges()[name], name, read_pairs(pairs))


def modules_in(package: ModuleType) -> list[ModuleType]:
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


def discover(package: ModuleType, base: type[P]) -> dict[str, type[P]]:
    modules = modules_in(package)
    return dict(sorted(pair for module in modules for pair in plugins_in(module, base).items()))


def plugins_in(module: ModuleType, base: type[P]) -> dict[str, type[P]]:
    return {
        vars(plugin)["name"]: plugin
        for plugin in vars(module).values()
        if isinstance(plugin, type)
        and issubclass(plugin, base)
        and plugin.__module__ == module.__name__
        and "name" in vars(plugin)
    }


def split_bits(head: str) -> tuple[str, str | None]:
    """Return the name and the bits of `gptq-4bit`."""
    match = re.fullmatch(r"(.+)-(\d+)bit", head)
    return (match[1], match[2]) if match else (head, None)


def _takes_bits(plugin: type[Scheme]) -> bool:
    return "bits" in {field.name for field in fields(plugin)}


def read_pairs(pairs: list[str]) -> dict[str, str]:
    """Read `key=value` texts, refusing one key twice."""
    read: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value):
            raise SchemeError(f"`{pair}` is not a parameter", hint="write `name=value`")
        if key in read:
            raise SchemeError(f"parameter `{key}` is given twice", hint="give it once")
        read[key] = value
    return read


def build(kind: type[P], name: str, explicit: dict[str, str]) -> P:
    plugin: Any = kind
    fields_by_name: dict[str, Field[Any]] = {field.name: field for field in fields(plugin)}
    values: dict[str, Any] = {}
    if (preset := explicit.pop("preset", None)) is not None:
        if preset not in plugin.presets:
            choice = ", ".join(plugin.presets) or "none"
            raise SchemeError(f"`{name}` has no preset `{preset}`", hint=f"presets: {choice}")
        values.update(plugin.presets[preset])
    for key, text in explicit.items():
        if key not in fields_by_name:
            hint = f"it takes: {', '.join(fields_by_name) or '-'}"
            if near := difflib.get_close_matches(key, fields_by_name, n=1):
                hint = f"did you mean `{near[0]}`?"
            raise SchemeError(f"`{name}` has no parameter `{key}`", hint=hint)
        values[key] = _read_value(name, fields_by_name[key], text)
    for key, field in fields_by_name.items():
        if key not in values and field.default is MISSING:
            example = f"{name}-4bit" if key == "bits" else f"{name}:{key}=..."
            raise SchemeError(f"`{name}` needs {key}", hint=f"write `{example}`")
    made: P = plugin(**values)
    return made


def _read_value(name: str, field: Field[Any], text: str) -> bool | int | float | str:
    kind = field.type if isinstance(field.type, str) else field.type.__name__
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind == "int" and re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if kind == "float":
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value):
            return value
    if kind == "str":
        return text
    wanted = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kind]
    raise SchemeError(f"`{field.name}={text}` of `{name}` is not {wanted}", hint=f"use {wanted}")


def short_forms(bits: Sequence[int] = (4, 3, 8, 2, 5, 6, 7)) -> list[str]:
    """Return every scheme in its short forms; those of others, which are not imported, in both."""
    forms: list[str] = []
    for name in schemes():
        plugin = schemes().built_in.get(name)
        takes_bits = None if plugin is None else _takes_bits(plugin)
        forms += [] if takes_bits else [name]
        forms += [] if takes_bits is False else [f"{name}-{number}bit" for number in bits]
    return forms


def unknown(
    kind: str, text: str, examples: Sequence[str], names: Iterable[str] | None = None
) -> SchemeError:
    lowered = text.lower().replace("_", "-")
    bare = split_bits(lowered)[0].replace("autogptq", "auto-gptq").replace("autoawq", "auto-awq")
    behind = [example for example in examples if example.endswith(f"-{lowered}")]
    near = behind or difflib.get_close_matches(lowered, examples, n=1)
    if bare in INSTEAD:
        hint = INSTEAD[bare]
    elif near:
        hint = f"did you mean `{near[0]}`?"
    else:
        hint = f"there are: {', '.join(examples if names is None else names)}"
    return SchemeError(f"there is no {kind} `{text}`", hint=hint)
