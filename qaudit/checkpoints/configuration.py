"""Read `config.json` without any library, and refuse what no library should be given.

A configuration comes from a stranger and decides what is built. The libraries that read it take
its word: a million layers are a list of a million entries, an attention implementation is the
name of a repository whose kernels are loaded. So counts are bounded here before anything is
built or priced; what is ours to choose is left out in `model/config.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qaudit.errors import ConfigurationError, QauditError, SourceError, is_out_of_memory
from qaudit.whole import read_regular

METADATA = ".metadata"
FSDP_FOLDER = "pytorch_model_fsdp_0"
WITHOUT_CONFIGURATION = (
    "put `config.json` and the tokenizer of the model into it, or once into the folder that holds "
    "all its checkpoints"
)
"""What a folder needs that holds a distributed checkpoint of torch (`header.py`)."""

NEWER = "check `model_type` and the values beside it; a newer `transformers` may know it"

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_POSITIVE = (
    *_LAYERS,
    "hidden_size", "n_embd", "d_model", "vocab_size", "intermediate_size",
    "num_attention_heads", "n_head", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len",
)  # fmt: skip
_CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_MOST_LAYERS = 10_000  # no model has a tenth of it; the headers of the weights say it exactly
_LARGEST_COUNT = 1 << 40
_LARGEST_NBYTES = 16_000_000
_DEEPEST = 32
_HINT = "fix `config.json`, or take that of the model the weights were trained with"


def read_configuration(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Return the table of a folder's configuration, or refuse it by name."""
    path = folder / name
    try:
        if path.stat().st_size > _LARGEST_NBYTES:
            raise ValueError(f"it is larger than {_LARGEST_NBYTES // 10**6} MB")
        table = json.loads(read_regular(path).decode())
        if not isinstance(table, dict):
            raise ValueError("it is not a table of keys")
        for inner in tables_of(table):
            _check(inner)
    except OSError as error:
        usual = "a checkpoint folder has one beside its weights"
        raise SourceError(
            f"`{path}` cannot be read: {(error.strerror or str(error)).lower()}",
            hint=WITHOUT_CONFIGURATION if dcp_folder(folder) else usual,
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"`{path}` cannot be read: {error}",
            hint="download it again; it is damaged or was cut short",
        ) from error
    except (ValueError, RecursionError) as error:
        why = "it nests too deep" if isinstance(error, RecursionError) else error
        raise ConfigurationError(f"`{path}` cannot be read: {why}", hint=_HINT) from error
    return table


def dcp_folder(folder: Path) -> Path | None:
    """Return where a folder's distributed checkpoint is, if it has one."""
    places = (folder, folder / FSDP_FOLDER)
    return next((place for place in places if (place / METADATA).is_file()), None)


@contextmanager
def unreadable(
    what: str, hint: str = NEWER, kind: type[SourceError] = ConfigurationError
) -> Iterator[None]:
    """Turn whatever a library raises while it reads a file into a sentence that begins so."""
    try:
        yield
    except QauditError:
        raise
    except BaseException as error:
        panicked = type(error).__name__ == "PanicException"  # of Rust; it is no Exception
        if is_out_of_memory(error) or not (isinstance(error, Exception) or panicked):
            raise
        lines = str(error).strip().splitlines() or [""]
        validated = "StrictDataclass" in type(error).__name__  # names the check first, why last
        line = "".join(c if c.isprintable() else " " for c in lines[-1 if validated else 0])
        reason = line.strip().rstrip(".")[:300] or type(error).__name__
        raise kind(f"{what}: {reason}", hint=hint) from error


def must_be_held(config: Mapping[str, Any], tensors: int, where: str) -> None:
    """Refuse more layers than there are tensors: each has at least one."""
    layers = max((t[k] for t in tables_of(config) for k in _LAYERS if t.get(k)), default=0)
    if layers > tensors:
        raise ConfigurationError(
            f"`config.json` of {where} has {layers} layers, and its weights hold {tensors} tensors",
            hint=_HINT,
        )


def is_own_code(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` names code of its repository for an unknown model type.

    A model type that the library knows is never run from a repository's code.
    """
    if not config.get("auto_map"):
        return False
    # A table of names: importing it does not load torch, so that a plan can look there.
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    return str(config.get("model_type")) not in CONFIG_MAPPING_NAMES


def longest_context(config: Mapping[str, Any], default: int) -> int:
    """Return how many tokens a model reads at once, as far as its configuration says."""
    return next((int(config[key]) for key in _CONTEXTS if config.get(key)), default)


def tables_of(value: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield a table and all that are inside it."""
    if depth > _DEEPEST:
        raise ValueError(f"it nests deeper than {_DEEPEST} tables and lists")
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value
    for part in inner:
        if isinstance(part, dict | list):
            yield from tables_of(part, depth + 1)


def _check(table: Mapping[str, Any]) -> None:
    for key in _POSITIVE:
        value = table.get(key)
        for count in value if isinstance(value, list) else [value]:  # one for each layer
            if count is not None and (type(count) is not int or not 0 < count < _LARGEST_COUNT):
                raise ValueError(f"`{key}` is {_shown(count)}, which is not a whole number above 0")
    for key in _LAYERS:
        if isinstance(table.get(key), list) or (table.get(key) or 0) > _MOST_LAYERS:
            raise ValueError(f"`{key}` is {_shown(table[key])}, and no model has as many layers")
    architectures = table.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise ValueError(f"`architectures` is {_shown(architectures)}, which is no list of names")
    kinds = {"model_type": (str, "a name"), "quantization_config": (dict, "a table of keys")}
    for key, (kind, what) in kinds.items():
        if not isinstance(table.get(key), kind | None):
            raise ValueError(f"`{key}` is {_shown(table[key])}, which is not {what}")


def _shown(value: Any) -> str:
    text = ascii(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a huge number"
    return f"`{text[:60]}...`" if len(text) > 60 else f"`{text}`"
