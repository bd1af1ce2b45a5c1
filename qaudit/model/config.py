"""A folder's configuration as the library reads it, and what of it is ours to choose.

A model whose code is in its own repository: run only with `--trust-remote-code`.

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
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    __version__,
    initialization,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from qaudit.checkpoints.configuration import is_own_code, read_configuration, unreadable
from qaudit.errors import ModelError, SourceError, is_out_of_memory
from qaudit.model.routes import Weights, must_be_read, must_be_stored
from qaudit.whole import read_regular, read_table

MODEL, CONFIG = "AutoModelForCausalLM", "AutoConfig"
_CLASS = re.compile(r"[A-Za-z_]\w*(?:/[A-Za-z_]\w*)*\.[A-Za-z_]\w*", re.ASCII)
_FOREIGN = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
    OSError, RuntimeError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""What foreign code may raise."""


def is_remote(folder: Path) -> bool:
    """Return whether a folder's model is code of its own and not one the library knows."""
    return is_own_code(read_table(folder / "config.json"))


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


def remote_class(folder: Path, auto: str, file: str = "config.json") -> Any:
    """Import the class that `auto_map` names from the folder, and from nowhere else."""
    table = read_table(folder / file)
    auto_map = table.get("auto_map")
    name = auto_map.get(auto) if isinstance(auto_map, dict) else auto_map
    if isinstance(name, list):  # of tokenizers: the slow one, then the fast one
        name = next((n for n in reversed(name) if n), None)
    if not isinstance(name, str):
        hint = "only decoder language models can be audited"
        raise ModelError(f"`{folder / file}` names no code for `{auto}`", hint=hint)
    if not _CLASS.fullmatch(name):
        raise ModelError(
            f"`{folder / file}` takes its code from `{name[:100]}`, which is not a class beside it",
            hint="code of another repository is not pinned to a commit and is never run",
        )
    registered, model_type = CONFIG_MAPPING._extra_content, str(table.get("model_type"))
    registered.pop(model_type, None)
    try:
        with foreign(folder, "to be imported"):
            return get_class_from_dynamic_module(name, str(folder), local_files_only=True)
    finally:  # code may register its model type, which is forgotten: the next commit brings its own
        registered.pop(model_type, None)


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


def build_remote(config: PreTrainedConfig, folder: Path, dtype: Any, what: str) -> Any:
    """Build a model without its weights, on torch's default device."""
    kind = remote_class(folder, MODEL)
    if isinstance(getattr(kind, "_tied_weights_keys", None), list):  # these ties are left to us
        kind._tied_weights_keys = None
        kind.tied_as_in_version_4 = True
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
    tensors = {name: weights.read(name) for name in weights.names()}
    must_be_read(tensors.keys() - model.state_dict().keys(), model, folder)
    with foreign(folder, "to take its weights"):
        model.load_state_dict(tensors, strict=False)
        model.tie_weights(recompute_mapping=False)
    # Each parameter and stored buffer was read, or is tied to one that was.
    needed = model.state_dict(keep_vars=True)
    filled = {id(tensor) for name, tensor in needed.items() if name in tensors}
    must_be_stored([name for name, tensor in needed.items() if id(tensor) not in filled], folder)
    return model.eval().requires_grad_(False)


_NOT_COMPARED = frozenset({
    "_name_or_path", "architectures", "id2label", "label2id", "transformers_version", "use_cache",
    "dtype", "torch_dtype",  # what is stored is read, and merged in double precision
})  # fmt: skip

_RETURNED = ("return_dict", "output_attentions", "output_hidden_states", "output_router_logits")
"""What a configuration may return beside logits, or in place of names for them."""


def must_have_config(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise SourceError(
            f"no `config.json` in `{folder}`", hint="a checkpoint folder has one beside its weights"
        )


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read a folder's config, and refuse what is not a causal language model.

    Code of the repository is run only with leave, and never for a model the library knows.
    """
    must_have_config(folder)
    read_configuration(folder)  # refuses what would harm the library
    config: PreTrainedConfig
    if is_remote(folder):
        if not trust_remote_code:
            raise ModelError(
                f"the model in `{folder}` is code of its own, which is not run unless asked for",
                hint="read the code, then pass `--trust-remote-code` to run it on this machine",
            )
        kind: Any = remote_class(folder, CONFIG)
        with foreign(folder, "to read its config"):
            config = kind.from_pretrained(str(folder), local_files_only=True)
    else:
        with unreadable(f"`{folder / 'config.json'}` does not describe a known model"):
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
    # Attention, experts, kernels, quantization and what is returned are this engine's to choose: a
    # checkpoint that names them would load kernels of a repository, or packages, unasked.
    for part in (config, config.get_text_config()):
        for key in _RETURNED:
            if getattr(part, key, None) is not None:
                setattr(part, key, key == "return_dict")
    config._attn_implementation = None
    config._experts_implementation = None
    for key in ("kernel_config", "use_kernels", "quantization_config"):
        config.__dict__.pop(key, None)
    architectures = list(getattr(config, "architectures", None) or [])
    causal = is_wrapper(config) or all(
        re.search(r"(ForCausalLM|LMHeadModel)$", name) for name in architectures
    )
    if not causal or getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"`{folder}` is a `{', '.join(architectures) or config.model_type}`, "
            "not a decoder language model",
            hint="only models trained to predict the next token of a text can be audited",
        )
    return config


def is_wrapper(config: PreTrainedConfig) -> bool:
    """Return whether a text decoder has other towers beside it (`*ForConditionalGeneration`)."""
    text = config.get_text_config(decoder=True)
    return text is not config and _named_class(config) is not None


def class_of(config: PreTrainedConfig) -> Any:
    """Return the class that a configuration names, or that of causal models of its type."""
    causal: Any = AutoModelForCausalLM._model_mapping
    if (kind := _named_class(config) or causal.get(type(config), None)) is None:
        raise ValueError(f"`transformers` has no causal language model for `{config.model_type}`")
    return kind


def _named_class(config: PreTrainedConfig) -> Any:
    names = set(getattr(config, "architectures", None) or ())
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        mapping: Any = auto._model_mapping
        classes = mapping.get(type(config), ())
        for kind in classes if isinstance(classes, tuple) else (classes,):
            if kind.__name__ in names:
                return kind
    return None


def must_be_one_architecture(labels: Sequence[str], folders: Sequence[Path]) -> None:
    """Refuse members of a soup whose configurations differ, naming the first key that does.

    Names and shapes of tensors do not show it: a head of another width, a rope of another base or
    another activation fits the same tensors. What a repository added on its own (the number of
    the checkpoint, say) is not compared, and neither is what has no part in the arithmetic.
    """
    if len(folders) < 2:
        return
    first = _compared(folders[0])
    for label, folder in zip(labels[1:], folders[1:], strict=True):
        other = _compared(folder)
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise SourceError(
                    f"`{labels[0]}` and `{label}` cannot be merged: `{key}` is "
                    f"{first.get(key)} in one configuration and {other.get(key)} in the other",
                    hint="a soup needs members of one architecture",
                )


def _compared(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    compared = type(config)().to_dict().keys() - _NOT_COMPARED
    return {key: value for key, value in config.to_dict().items() if key in compared}
