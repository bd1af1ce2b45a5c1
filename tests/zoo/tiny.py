"""Every text-generating type of the installed transformers, made tiny with random weights.

Configurations are data (`tiny.yaml`): numbers for what a configuration has of the usual names, and
changes for types that need more. Nothing here knows qaudit.
"""

import inspect
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TABLES = yaml.safe_load(Path(__file__).with_name("tiny.yaml").read_text(encoding="utf-8"))
TEXT_PARTS = ("text_config", "llm_config", "decoder_config", "language_config")
_MOST_PARAMETERS = 100_000_000


def decoders():
    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def wrappers():
    """Return the types that carry text beside something else, and no plain decoder."""
    named = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        | modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    )
    return sorted(set(named) - set(decoders()))


def config_of(model_type, changes=None):
    """Return a tiny configuration of a type, those inside it included."""
    kind = CONFIG_MAPPING[model_type]
    parts = {k: v for k, v in (kind.sub_configs or {}).items() if k in _names(kind)}
    usual = dict(TABLES["text"])
    if parts:  # widths belong to the parts
        usual = {k: v for k, v in usual.items() if k not in ("hidden_size", "intermediate_size")}
    return kind(**{**_inner(kind, parts), **_changed(kind, usual), **(changes or {})})


def _inner(kind, parts):
    if not parts:
        return {}
    try:
        default = kind()
    except Exception:  # noqa: BLE001 - some have no default, and need none
        default = None
    inner = {}
    for name, part in parts.items():
        default_part = getattr(default, name, None)
        part_kind = part if default_part is None else type(default_part)
        if not getattr(part_kind, "model_type", ""):
            part_kind = CONFIG_MAPPING["llama"] if "text" in name else part_kind
        table = TABLES["text" if name in TEXT_PARTS else "vision"]
        inner[name] = {"model_type": part_kind.model_type, **_changed(part_kind, table)}
    return inner


def _changed(kind, usual):
    values = {k: v for k, v in usual.items() if k in _names(kind)}
    values |= TABLES["types"].get(kind.model_type, {})
    return {k: v for k, v in values.items() if v is not None}


def _names(kind):
    names = set(inspect.signature(kind.__init__).parameters)
    for base in kind.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
    return names - {"kwargs", "self"}


def class_of(config):
    """Return the class that a release of this configuration names."""
    for auto in (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForCausalLM):
        mapping = auto._model_mapping
        kind = mapping.get(type(config), None)
        if kind:
            return kind[0] if isinstance(kind, tuple) else kind
    raise ValueError("no class for it")


def save(folder, model_type, changes=None):
    """Save a random model as the library saves it; return its class."""
    return save_config(folder, config_of(model_type, changes))


def save_config(folder, config):
    """Save a random model of a configuration; return its class."""
    kind = class_of(config)
    with torch.device("meta"):
        count = sum(p.numel() for p in kind._from_config(config).parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"{count // 10**6} M parameters are not tiny")
    torch.manual_seed(0)
    model = kind._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.05
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
        for module in model.modules():  # training leaves it at zero; one type zeroes it on loading
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    model.save_pretrained(folder)
    return kind
