"""How optional packages are installed: as extras of this distribution, with its bounds."""

from __future__ import annotations

INSTALL = "pip install qaudit-llm"
EXTRAS = {
    "accelerate": "verify",
    "compressed-tensors": "verify",
    "gguf": "gguf",
    "gptqmodel": "gptqmodel",
    "lm_eval": "tasks",
    "mlx-lm": "mlx",
    "pandas": "pandas",
    "pyarrow": "parquet",
    "vllm": "vllm",
    "xllamacpp": "llamacpp",
    "zstandard": "inspect",
}
"""Package -> the extra that brings it. What is not listed is a dependency."""


def install(*packages: str) -> str:
    """Return the command that installs packages."""
    extras = sorted({EXTRAS[name] for name in packages if name in EXTRAS})
    return f"pip install 'qaudit-llm[{','.join(extras)}]'" if extras else INSTALL
