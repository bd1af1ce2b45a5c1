"""Sets of schemes that `--schemes` takes by one name, and what is suggested for names of others.

With `settings.DEFAULT_SCHEMES` this is where schemes are named outside their own files.
"""

from __future__ import annotations

from collections.abc import Mapping

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
        "spinquant-4bit", "ostquant-4bit",
    ),
}  # fmt: skip

INSTEAD = {
    "auto-gptq": "AutoGPTQ is archived; its algorithm is built in, as `gptq-4bit`",
    "auto-awq": "AutoAWQ is archived; its algorithm is built in, as `awq-4bit`",
    "bitsandbytes": "use `bnb-nf4`, `bnb-fp4` or `bnb-int8`",
    "bnb": "use `bnb-nf4`, `bnb-fp4` or `bnb-int8`",
    "base-q": "its equations could not be checked against its paper (docs/schemes.md); "
    "`quarot-4bit` has its rotations",
    "fp": "full precision is always measured; leave it out",
}
"""Hints for names of libraries and of schemes that are not here."""
