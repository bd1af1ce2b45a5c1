"""The weights of a run at a step -> a folder that `transformers` and `qaudit scan` read.

bf16 safetensors with the config and the tokenizer, written beside its place and moved there whole.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import logging as hf_logging

from qaudit.errors import not_written
from qaudit.lab.run import Run
from qaudit.lab.text import TokenStream


def write_checkpoint(
    run: Run, weights: Mapping[str, Tensor], text: TokenStream, folder: Path
) -> None:
    """Write weights as a checkpoint; one that was there is replaced."""
    with torch.random.fork_rng(devices=[]):
        model = run.shape.empty()
    missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    assert not unexpected, unexpected
    assert run.shape.tied or not missing, missing  # what is shared has one name of two
    text.tokenizer.model_max_length = run.context
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        with _no_bars():
            model.bfloat16().save_pretrained(partial)
        text.tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise not_written(folder, _as_system_s(error)) from error


def _as_system_s(error: Exception) -> OSError:
    """Return the system's error; safetensors writes its number into a sentence."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]) if number else errno.EIO, str(error))


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Let transformers draw no bar for a file of megabytes."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
