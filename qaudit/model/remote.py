"""A model whose code is in its own repository: run only with `--trust-remote-code`.

Running such code is running a stranger's program, so three things hold. Without leave nothing of
it is ever imported. With leave it is imported from the folder of the checkpoint alone, where the
files are those of one commit and have been checked; code that a config takes from yet another
repository has no pinned commit, and is refused. And a model type that
`transformers` knows is never run from repository code at all, leave or no leave: the native
model is the one whose stream is tested.

The library copies the files and names their module after a hash of their text, so that a module
of another commit is never taken for this one. Its registry of model types knows no commits:
code that registers itself would be found there by the next checkpoint, so it is asked for
classes directly and its registrations are taken back.

The library builds models without memory and fills them, and loses every buffer that is computed
and not stored unless the model's initializer makes it again. Code written for older versions
does not: rotary frequencies become zeros, and logits are wrong without a word. Here the whole
model is therefore built with memory once, and its blocks take their buffers from it. Ties listed
without their source, as version 4 took them, are made as version 4 made them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, __version__, initialization
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from qaudit.checkpoints.configuration import is_own_code
from qaudit.errors import ModelError, SourceError, is_out_of_memory
from qaudit.model.routes import Weights, must_be_read, some
from qaudit.whole import read_regular

MODEL, CONFIG = "AutoModelForCausalLM", "AutoConfig"
_CLASS = re.compile(r"[A-Za-z_]\w*(?:/[A-Za-z_]\w*)*\.[A-Za-z_]\w*", re.ASCII)
_FOREIGN = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
    OSError, RuntimeError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""What foreign code may raise."""


def is_remote(folder: Path) -> bool:
    """Return whether a folder's model is code of its own and not one the library knows."""
    return is_own_code(_config_of(folder))


def must_be_trusted(folder: Path, trust_remote_code: bool) -> None:
    """Refuse to run a repository's code without leave."""
    if not trust_remote_code:
        raise ModelError(
            f"the model in `{folder}` is code of its own, which is not run unless asked for",
            hint="read the code, then pass `--trust-remote-code` to run it on this machine",
        )


def code_sha256(folder: Path) -> str:
    """Identify the code of a folder by all of its Python files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        raw = read_regular(path)
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(raw)}\0".encode() + raw)
    return digest.hexdigest()


def ran(folder: Path) -> str:
    """Return the note that code of a repository was run, and which."""
    parts = folder.parts
    commit = parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else None
    where = f"of commit {commit}" if commit else f"in `{folder}`"
    return f"the repository's own code {where} was run (sha256 {code_sha256(folder)[:12]})"


def remote_config(folder: Path) -> PreTrainedConfig:
    """Return the config of a model with code of its own."""
    kind: Any = remote_class(folder, CONFIG)
    with foreign(folder, "to read its config"):
        config: PreTrainedConfig = kind.from_pretrained(str(folder), local_files_only=True)
    return config


def remote_class(folder: Path, auto: str, file: str = "config.json") -> Any:
    """Import the class that `auto_map` names from the folder, and from nowhere else."""
    table = _config_of(folder, file)
    auto_map = table.get("auto_map")
    name = auto_map.get(auto) if isinstance(auto_map, dict) else auto_map
    if isinstance(name, list):  # of tokenizers: the slow one, then the fast one
        name = next((n for n in reversed(name) if n), None)
    where = f"`{folder / file}`"
    if not isinstance(name, str):
        raise ModelError(
            f"{where} names no code for `{auto}`",
            hint="only decoder language models can be audited",
        )
    if not _CLASS.fullmatch(name):
        raise ModelError(
            f"{where} takes its code from `{name[:100]}`, which is not a class beside it",
            hint="code of another repository is not pinned to a commit and is never run",
        )
    with foreign(folder, "to be imported"), _nothing_registered(str(table.get("model_type"))):
        return get_class_from_dynamic_module(name, str(folder), local_files_only=True)


@contextmanager
def foreign(folder: Path, what: str) -> Iterator[None]:
    """Turn whatever a repository's code raises into an error about that code."""
    try:
        yield
    except _FOREIGN as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200] or "no reason given"
        raise ModelError(
            f"the code in `{folder}` fails {what}: {type(error).__name__}: {reason}",
            hint=f"it may be written for another `transformers` than {__version__}",
        ) from error


@contextmanager
def _nothing_registered(model_type: str) -> Iterator[None]:
    """Let code register its model type, and forget it: the next commit brings its own."""
    registered = CONFIG_MAPPING._extra_content
    registered.pop(model_type, None)
    try:
        yield
    finally:
        registered.pop(model_type, None)


def model_class(folder: Path) -> Any:
    """Import the class of a folder's model; ties listed as version 4 wanted are left to us."""
    kind = remote_class(folder, MODEL)
    if isinstance(getattr(kind, "_tied_weights_keys", None), list):
        kind._tied_weights_keys = None
        kind.tied_as_in_version_4 = True
    return kind


def build_remote(config: PreTrainedConfig, folder: Path, dtype: Any, what: str) -> Any:
    """Build a model without its weights, on torch's default device."""
    kind = model_class(folder)
    with foreign(folder, what), initialization.no_init_weights():
        model = kind._from_config(config, dtype=dtype)
    if getattr(kind, "tied_as_in_version_4", False) and config.tie_word_embeddings:
        names = {id(module): name for name, module in model.named_modules()}
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        model.all_tied_weights_keys = {
            f"{names[id(head)]}.weight": f"{names[id(embedding)]}.weight"
        }
    return model


def computed_buffers(config: PreTrainedConfig, folder: Path, dtype: Any) -> dict[str, Tensor]:
    """Return the buffers that the code computes and no file stores."""
    model = build_remote(config, folder, dtype, "to be built")
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in stored}


def load_remote(config: PreTrainedConfig, folder: Path, weights: Weights, dtype: Any) -> Any:
    """Build the whole model in memory, so that computed buffers are there, and fill it."""
    model = build_remote(config, folder, dtype, "to be built")
    parameters = model.state_dict()
    tensors = {name: weights.read(name) for name in weights.names()}
    ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    must_be_read(tensors.keys() - parameters.keys(), ignored, folder)
    with foreign(folder, "to take its weights"):
        model.load_state_dict(tensors, strict=False)
        model.tie_weights(recompute_mapping=False)
    _must_be_whole(model, set(tensors), folder)
    return model.eval().requires_grad_(False)


def _must_be_whole(model: Any, read: set[str], folder: Path) -> None:
    """Refuse a model with a parameter or stored buffer that neither was read nor is tied."""
    tensors = model.state_dict(keep_vars=True)
    filled = {id(tensor) for name, tensor in tensors.items() if name in read}
    if unfilled := [name for name, tensor in tensors.items() if id(tensor) not in filled]:
        raise SourceError(
            f"no tensor for {some(unfilled)} in `{folder}`",
            hint="the checkpoint is incomplete, or its config belongs to another model",
        )


def _config_of(folder: Path, file: str = "config.json") -> dict[str, Any]:
    """Return a table of JSON; empty where it cannot be read, which a later read refuses."""
    try:
        table = json.loads(read_regular(folder / file).decode())
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}
