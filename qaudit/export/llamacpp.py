"""GGUF files in llama.cpp, through the library in the wheel of xllamacpp.

Its C interface is no promise: structures that are passed by value are declared larger than they
are, and what is set in them is compared with its default first. Runs on x86-64 alone, where larger
structures are passed in the same way.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qaudit.errors import ModelError
from qaudit.support.keys import install


class _Parameters(ctypes.Structure):
    """Longer than either of llama.cpp's; zeros behind its end are not read."""

    _fields_ = (("words", ctypes.c_uint32 * 128),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_SILENT = _LOG(lambda level, text, data: None)

# Places in the parameters of a context, in words of four bytes, and their defaults.
_CONTEXT, _BATCH, _MICROBATCH = 0, 1, 2
_FLASH_ATTENTION, _KEYS, _VALUES = 13, 26, 27
_DEFAULTS = {
    _CONTEXT: 512, _BATCH: 2048, _MICROBATCH: 512, _FLASH_ATTENTION: 2**32 - 1, _KEYS: 1, _VALUES: 1
}  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None or platform.machine() not in ("x86_64", "AMD64"):
        raise ModelError(
            "llama.cpp runs through `xllamacpp`, on x86-64 alone", hint=install("xllamacpp")
        )
    (path,) = Path(spec.origin).parent.glob("xllamacpp*.so")
    loaded = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    for name, returned, *arguments in (
        ("llama_model_default_params", _Parameters),
        ("llama_context_default_params", _Parameters),
        ("llama_model_load_from_file", pointer, ctypes.c_char_p, _Parameters),
        ("llama_model_get_vocab", pointer, pointer),
        ("llama_vocab_n_tokens", ctypes.c_int32, pointer),
        ("llama_init_from_model", pointer, pointer, _Parameters),
        ("llama_get_memory", pointer, pointer),
        ("llama_memory_clear", None, pointer, ctypes.c_bool),
        ("llama_batch_init", _Batch, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32),
        ("llama_batch_free", None, _Batch),
        ("llama_decode", ctypes.c_int32, pointer, _Batch),
        ("llama_get_logits", ctypes.POINTER(ctypes.c_float), pointer),
        ("llama_log_set", None, _LOG, pointer),
        ("llama_free", None, pointer),
        ("llama_model_free", None, pointer),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = returned, arguments
    loaded.llama_log_set(_SILENT, None)
    return loaded


class LlamaCpp:
    """A model that llama.cpp loaded."""

    def __init__(self, path: Path) -> None:
        self._library = library()
        self._model = self._library.llama_model_load_from_file(
            str(path).encode(), self._library.llama_model_default_params()
        )
        if not self._model:
            raise ModelError(
                f"llama.cpp does not load `{path}`",
                hint="compare its version with the one in the folder's README.md",
            )
        words = self._library.llama_model_get_vocab(self._model)
        self.vocabulary = int(self._library.llama_vocab_n_tokens(words))
        self._context: Any = None
        self._length = 0

    def __call__(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, V) in float32, each row from an empty cache."""
        self._open(tokens_BT.shape[1])
        return torch.stack([self._logits(tokens) for tokens in tokens_BT.tolist()])

    def _open(self, length: int) -> None:
        """Make a context for texts of a length: exact attention, and a cache in float32."""
        if length <= self._length:
            return
        self._close()
        parameters = self._library.llama_context_default_params()
        words = parameters.words
        if any(words[place] != value for place, value in _DEFAULTS.items()):
            raise ModelError(
                "this version of `xllamacpp` has other parameters than are known here",
                hint=f"{install('xllamacpp')} --force-reinstall",
            )
        words[_CONTEXT] = words[_BATCH] = words[_MICROBATCH] = length
        words[_FLASH_ATTENTION] = words[_KEYS] = words[_VALUES] = 0
        self._context = self._library.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise ModelError("llama.cpp has no memory for the model", hint="free some memory")
        self._length = length

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        library = self._library
        library.llama_memory_clear(library.llama_get_memory(self._context), True)
        batch = library.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for k, token in enumerate(tokens):
            batch.token[k], batch.pos[k], batch.n_seq_id[k], batch.logits[k] = token, k, 1, 1
            batch.seq_id[k][0] = 0
        status = library.llama_decode(self._context, batch)
        library.llama_batch_free(batch)
        if status != 0:
            raise ModelError(
                f"llama.cpp stops with {status} where it runs the file", hint="export it again"
            )
        pointer = library.llama_get_logits(self._context)
        array = np.ctypeslib.as_array(pointer, (len(tokens), self.vocabulary))
        return torch.from_numpy(array.copy())

    def _close(self) -> None:
        if self._context:
            self._library.llama_free(self._context)
            self._context = None

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._close()
            self._library.llama_model_free(self._model)
            self._model = None
