"""Logits that llama.cpp decodes, through the library in the wheel of xllamacpp.

Its C interface is no promise: structures that are passed by value are declared larger than they
are, and what is set in them is checked against its default first. Runs on x86-64 alone.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np


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


_COUNTS = (ctypes.c_int64,) * 3  # first row, rows, columns
_KINDS = ("q8_0", "q4_0", "q5_0", "q5_1", "q3_K", "q4_K", "q5_K", "q6_K")

_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_SILENT = _LOG(lambda level, text, data: None)

# Places in the parameters of a context, in words of four bytes.
_CONTEXT, _BATCH, _MICROBATCH = 0, 1, 2
_FLASH_ATTENTION, _KEYS, _VALUES = 13, 26, 27


def _library() -> ctypes.CDLL:
    spec = find_spec("xllamacpp")
    assert spec is not None
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("xllamacpp*.so")
    library = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    for name, returned, *arguments in (
        ("llama_model_default_params", _Parameters),
        ("llama_context_default_params", _Parameters),
        ("llama_model_load_from_file", pointer, ctypes.c_char_p, _Parameters),
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
        ("ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, pointer, pointer, *_COUNTS, pointer),
        *((f"dequantize_row_{kind}", None, pointer, pointer, ctypes.c_int64) for kind in _KINDS),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = returned, arguments
    library.llama_log_set(_SILENT, None)
    return library


def quantized(kind: str, weight_RC: np.ndarray, importance_C: np.ndarray | None) -> np.ndarray:
    """Return the bytes that ggml makes of a matrix."""
    number = gguf.GGMLQuantizationType[kind]
    columns, nbytes = gguf.GGML_QUANT_SIZES[number]
    rows, all_columns = weight_RC.shape
    packed_RB = np.empty((rows, all_columns // columns * nbytes), np.uint8)
    importance = None if importance_C is None else importance_C.ctypes.data
    counted = _library().ggml_quantize_chunk(
        number, weight_RC.ctypes.data, packed_RB.ctypes.data, 0, rows, all_columns, importance
    )
    assert counted == packed_RB.nbytes
    return packed_RB


def dequantized(kind: str, packed_RB: np.ndarray, columns: int) -> np.ndarray:
    """Return the weights that ggml reads in bytes."""
    weight_RC = np.empty((len(packed_RB), columns), np.float32)
    function = getattr(_library(), f"dequantize_row_{kind.lower().replace('_k', '_K')}")
    function(packed_RB.ctypes.data, weight_RC.ctypes.data, weight_RC.size)
    return weight_RC


def logits_of(path: Path, windows: list[list[int]], vocabulary: int) -> list[np.ndarray]:
    """Return the logits (tokens, vocabulary) of each window in float64."""
    library, longest = _library(), max(map(len, windows))
    model = library.llama_model_load_from_file(
        str(path).encode(), library.llama_model_default_params()
    )
    assert model, f"llama.cpp does not load {path}"
    parameters = library.llama_context_default_params()
    words = parameters.words
    assert (words[_CONTEXT], words[_BATCH], words[_MICROBATCH]) == (512, 2048, 512)
    assert (words[_FLASH_ATTENTION], words[_KEYS], words[_VALUES]) == (2**32 - 1, 1, 1)
    words[_CONTEXT] = words[_BATCH] = words[_MICROBATCH] = longest
    words[_FLASH_ATTENTION] = 0
    words[_KEYS] = words[_VALUES] = 0  # the cache in float32
    context = library.llama_init_from_model(model, parameters)
    assert context
    read = []
    for tokens in windows:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        batch = library.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for k, token in enumerate(tokens):
            batch.token[k], batch.pos[k], batch.n_seq_id[k], batch.logits[k] = token, k, 1, 1
            batch.seq_id[k][0] = 0
        assert library.llama_decode(context, batch) == 0
        pointer = library.llama_get_logits(context)
        read.append(np.ctypeslib.as_array(pointer, (len(tokens), vocabulary)).astype(np.float64))
        library.llama_batch_free(batch)
    library.llama_free(context)
    library.llama_model_free(model)
    return read
