"""What a small model looks like: OLMo-2, Llama or GPT-NeoX, from one to 160 million parameters.

A preset is a kind and a size: `olmo2-1m`, `llama-12m`, `neox-160m`. Every width is a multiple of
128, so that a group of 128 weights, which is what quantization is mostly measured with, is never
a broken one. Llama and OLMo-2 share the sizes and tie their embeddings; GPT-NeoX is as Pythia has
it: untied, parallel residuals, biases, rotary embeddings on a quarter of each head. Sizes count
everything, the embeddings too: at 70 and 160 million the vocabulary is Pythia's 50,304 (or near),
below it shrinks with the model, or nothing else would be left in it.

What was given up: the initializations of the three trainers. All are drawn as `transformers`
draws them, a normal of 0.02.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qaudit.core.keys import nearest
from qaudit.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

KINDS = ("olmo2", "llama", "neox")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The kind and the size of a model; `context` is also the window that is trained on."""

    kind: str = "olmo2"
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    tied: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be built, each wrong value with what is allowed."""
        wrong = [
            f"`{name}` is {getattr(self, name)} (at least {least})"
            for name, least in _AT_LEAST.items()
            if getattr(self, name) < least
        ]
        if self.kind not in KINDS:
            wrong.append(f"`kind` is `{self.kind}` (one of {', '.join(KINDS)})")
        elif not wrong:
            wrong = list(_misfits(self))
        if wrong:
            raise UsageError(f"no such model: {'; '.join(wrong)}", hint="mend the sizes")

    def build(self, seed: int, attention: str = "sdpa") -> PreTrainedModel:
        """Return a freshly initialized model of this shape; the global generator is left alone."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.empty(attention)

    def empty(self, attention: str = "sdpa") -> PreTrainedModel:
        """Return a model of this shape with whatever weights it is born with."""
        from transformers import AutoModelForCausalLM

        config = _CONFIGS[self.kind](self)
        config._attn_implementation = attention
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        return model

    def parameters(self) -> int:
        """Count the parameters, shared ones once."""
        import torch

        with torch.device("meta"):
            return sum(p.numel() for p in self.empty().parameters())


_AT_LEAST = {
    "hidden": 2, "ffn": 1, "layers": 1, "heads": 1, "kv_heads": 1, "vocabulary": 2, "context": 2,
}  # fmt: skip


def _misfits(shape: Shape) -> list[str]:
    wrong = []
    if shape.hidden % (2 * shape.heads):
        wrong.append(f"`hidden` is {shape.hidden} (a multiple of twice the {shape.heads} heads)")
    if shape.heads % shape.kv_heads:
        wrong.append(f"`kv_heads` is {shape.kv_heads} (a divisor of the {shape.heads} heads)")
    if shape.kind == "neox" and shape.kv_heads != shape.heads:
        wrong.append(f"`kv_heads` is {shape.kv_heads} ({shape.heads}: neox has one for each head)")
    return wrong


def _shared(shape: Shape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


def _olmo2(shape: Shape) -> PreTrainedConfig:
    from transformers import Olmo2Config

    return Olmo2Config(**_shared(shape), num_key_value_heads=shape.kv_heads)


def _llama(shape: Shape) -> PreTrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(**_shared(shape), num_key_value_heads=shape.kv_heads)


def _neox(shape: Shape) -> PreTrainedConfig:
    # Pythia turns a quarter of each head; a head too small for a pair of it turns whole.
    turned = 0.25 if shape.hidden // shape.heads % 8 == 0 else 1.0
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": turned}
    from transformers import GPTNeoXConfig

    return GPTNeoXConfig(**_shared(shape), rope_parameters=rope)


_CONFIGS = {"olmo2": _olmo2, "llama": _llama, "neox": _neox}

# ------------------------------------------------------------------------------------ presets

# hidden, ffn, layers, heads, kv_heads, vocabulary, context
_GATED = {
    "1m": (128, 384, 4, 4, 2, 2048, 256),
    "4m": (256, 768, 4, 4, 2, 4096, 256),
    "12m": (384, 1024, 5, 6, 3, 8192, 512),
    "30m": (512, 1536, 7, 8, 4, 16_384, 512),
    "70m": (768, 2048, 7, 12, 6, 32_768, 1024),
    "160m": (1024, 2816, 9, 16, 8, 50_304, 2048),
}
_NEOX = {
    "1m": (128, 512, 3, 4, 4, 2048, 256),
    "4m": (256, 1024, 3, 4, 4, 4096, 256),
    "12m": (384, 1536, 3, 6, 6, 8192, 512),
    "30m": (512, 2048, 4, 8, 8, 16_384, 512),
    "70m": (512, 2048, 6, 8, 8, 50_304, 2048),
    "160m": (768, 3072, 12, 12, 12, 50_304, 2048),
}
_FIELDS = ("hidden", "ffn", "layers", "heads", "kv_heads", "vocabulary", "context")

PRESETS: dict[str, Shape] = {
    f"{kind}-{size}": Shape(
        kind=kind, tied=kind != "neox", **dict(zip(_FIELDS, numbers, strict=True))
    )
    for kind in KINDS
    for size, numbers in (_NEOX if kind == "neox" else _GATED).items()
}


def preset(name: str, **changed: Any) -> Shape:
    """Return the preset of this name, with the sizes changed that are given."""
    if name not in PRESETS:
        raise UsageError(f"there is no shape `{name}`", hint=nearest(name, PRESETS))
    given = {key: value for key, value in changed.items() if value is not None}
    return replace(PRESETS[name], **given)
