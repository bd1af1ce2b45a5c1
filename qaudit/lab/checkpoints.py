"""Write the weights of a run at a step as a folder that `transformers` and `qaudit scan` read.

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
    """Write weights as a checkpoint, in place of one that exists."""
    with torch.random.fork_rng(devices=[]):
        model = run.shape.uninitialized()
    missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    assert not unexpected, unexpected
    assert run.shape.tied or not missing, missing  # a tied weight has one name of two
    text.tokenizer.model_max_length = run.context
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        with _without_progress_bar():
            model.bfloat16().save_pretrained(partial)
        text.tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise not_written(folder, _os_error(error)) from error


def _os_error(error: Exception) -> OSError:
    """Return the system's error; safetensors writes its number into a sentence."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]) if number else errno.EIO, str(error))


@contextlib.contextmanager
def _without_progress_bar() -> Iterator[None]:
    was_enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            hf_logging.enable_progress_bar()
