"""The shape of a small model: OLMo-2, Llama or GPT-NeoX, from one to 160 million parameters.

A preset is a kind and a size: `olmo2-1m`, `llama-12m`, `neox-160m`. Every width is a multiple of
128, so that groups of 128 weights, by which most quantization is measured, are never broken.
Llama and OLMo-2 share the sizes and tie their embeddings; GPT-NeoX is Pythia's: untied, parallel
residuals, biases, rotary embeddings on a quarter of each head. Sizes count everything, embeddings
included: at 70 and 160 million the vocabulary is Pythia's 50,304 (or near), below it shrinks with
the model, or little else would be left in it.

Not reproduced: the initializations of the three trainers. All weights are drawn as `transformers`
draws them, a normal of 0.02.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from experiments.document import STRICT
from qaudit.support.keys import nearest
from qaudit.support.lazy import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Kind = Literal["olmo2", "llama", "neox"]
KINDS: tuple[str, ...] = get_args(Kind)
Count = Annotated[int, Field(strict=True, ge=1)]
Even = Annotated[int, Field(strict=True, ge=2)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelShape:
    """The kind and the sizes of a model; `context` is also the window that it is trained on."""

    kind: Kind = "olmo2"
    hidden: Even
    ffn: Count
    layers: Count
    heads: Count
    kv_heads: Count
    vocabulary: Even
    context: Even
    tied: bool = True

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"`hidden` is {self.hidden}; it must be a multiple of twice the {self.heads} heads"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"`kv_heads` is {self.kv_heads}; it must divide the {self.heads} heads"
            )
        if self.kind == "neox" and self.kv_heads != self.heads:
            raise ValueError(
                f"`kv_heads` is {self.kv_heads}; neox has one for each of its {self.heads} heads"
            )
        return self

    def build(self, seed: int, attention: str = "sdpa") -> PreTrainedModel:
        """Return a freshly initialized model; the global random generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.uninitialized(attention)

    def uninitialized(self, attention: str = "sdpa") -> PreTrainedModel:
        """Return a model whose weights follow from the random generator as it stands."""
        from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Olmo2Config

        kind: Any = {"neox": GPTNeoXConfig, "llama": LlamaConfig, "olmo2": Olmo2Config}[self.kind]
        keys: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": None,
        }
        if self.kind == "neox":
            # Pythia rotates a quarter of each head; a head too small for one pair rotates whole.
            rotated = 0.25 if self.hidden // self.heads % 8 == 0 else 1.0
            rope = {"rope_theta": 10_000.0, "partial_rotary_factor": rotated}
            keys["rope_parameters"] = {"rope_type": "default", **rope}
        else:
            keys["num_key_value_heads"] = self.kv_heads
        config = kind(**keys)
        config._attn_implementation = attention
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        return model

    def parameters(self) -> int:
        """Count the parameters, shared ones once."""
        with torch.device("meta"):
            return sum(p.numel() for p in self.uninitialized().parameters())


_FIELDS = ("hidden", "ffn", "layers", "heads", "kv_heads", "vocabulary", "context")
_SIZES = {  # of OLMo-2 and Llama, and of GPT-NeoX
    "1m": ((128, 384, 4, 4, 2, 2048, 256), (128, 512, 3, 4, 4, 2048, 256)),
    "4m": ((256, 768, 4, 4, 2, 4096, 256), (256, 1024, 3, 4, 4, 4096, 256)),
    "12m": ((384, 1024, 5, 6, 3, 8192, 512), (384, 1536, 3, 6, 6, 8192, 512)),
    "30m": ((512, 1536, 7, 8, 4, 16_384, 512), (512, 2048, 4, 8, 8, 16_384, 512)),
    "70m": ((768, 2048, 7, 12, 6, 32_768, 1024), (512, 2048, 6, 8, 8, 50_304, 2048)),
    "160m": ((1024, 2816, 9, 16, 8, 50_304, 2048), (768, 3072, 12, 12, 12, 50_304, 2048)),
}

PRESETS: dict[str, ModelShape] = {
    f"{kind}-{size}": ModelShape(
        kind=kind,  # type: ignore[arg-type]
        tied=kind != "neox",
        **dict(zip(_FIELDS, numbers[kind == "neox"], strict=True)),
    )
    for kind in KINDS
    for size, numbers in _SIZES.items()
}


def preset(name: str, **changes: Any) -> ModelShape:
    """Return a preset, with some of its sizes changed; ValueError names what is wrong."""
    if name not in PRESETS:
        raise ValueError(f"there is no model `{name}`; {nearest(name, PRESETS)}")
    return ModelShape(**{**asdict(PRESETS[name]), **changes})
