"""A folder's configuration as the library reads it, and what of it is ours to choose."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)

from qaudit.checkpoints.configuration import read_configuration, unreadable
from qaudit.errors import ModelError, SourceError
from qaudit.model.remote import is_remote, must_be_trusted, remote_config

_NOT_COMPARED = frozenset({
    "_name_or_path", "architectures", "id2label", "label2id", "transformers_version", "use_cache",
    "dtype", "torch_dtype",  # what is stored is read, and merged in double precision
})  # fmt: skip

_RETURNED = ("return_dict", "output_attentions", "output_hidden_states", "output_router_logits")
"""What a configuration may return beside logits, or in place of names for them."""


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read a folder's config, and refuse what is not a causal language model.

    Code of the repository is run only with leave, and never for a model the library knows.
    """
    if not (folder / "config.json").is_file():
        raise SourceError(
            f"no `config.json` in `{folder}`", hint="a checkpoint folder has one beside its weights"
        )
    read_configuration(folder)  # refuses what would harm the library
    if is_remote(folder):
        must_be_trusted(folder, trust_remote_code)
        config = remote_config(folder)
    else:
        with unreadable(f"`{folder / 'config.json'}` does not describe a known model"):
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
    _choose_implementations(config)
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


def _choose_implementations(config: PreTrainedConfig) -> None:
    """Leave attention, experts, kernels and quantization to this engine, and what is returned.

    A checkpoint that names them would load kernels of a repository, or packages, unasked.
    """
    for part in (config, config.get_text_config()):
        for key in _RETURNED:
            if getattr(part, key, None) is not None:
                setattr(part, key, key == "return_dict")
    config._attn_implementation = None
    config._experts_implementation = None
    for key in ("kernel_config", "use_kernels", "quantization_config"):
        config.__dict__.pop(key, None)


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
