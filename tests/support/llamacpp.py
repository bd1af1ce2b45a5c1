"""ggml's own quantizers and what llama.cpp decodes, through the wheel of xllamacpp.

That wheel has no `llama-quantize`; `make peers` puts a library that has it into the environment.
"""

import ctypes
import multiprocessing
import sys
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import torch

from qaudit.export.llamacpp import LlamaCpp, library


def quantized(kind, weight_RC, importance_C):
    """Return the bytes that ggml makes of a matrix."""
    number = gguf.GGMLQuantizationType[kind]
    columns, nbytes = gguf.GGML_QUANT_SIZES[number]
    rows, all_columns = weight_RC.shape
    packed_RB = np.empty((rows, all_columns // columns * nbytes), np.uint8)
    function = library().ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (ctypes.c_int, pointer, pointer, count, count, count, pointer)
    importance = None if importance_C is None else importance_C.ctypes.data
    counted = function(
        number, weight_RC.ctypes.data, packed_RB.ctypes.data, 0, rows, all_columns, importance
    )
    assert counted == packed_RB.nbytes
    return packed_RB


def dequantized(kind, packed_RB, columns):
    """Return the weights that ggml reads in bytes."""
    weight_RC = np.empty((len(packed_RB), columns), np.float32)
    function = getattr(library(), f"dequantize_row_{kind.lower().replace('_k', '_K')}")
    function.restype, function.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    function(packed_RB.ctypes.data, weight_RC.ctypes.data, weight_RC.size)
    return weight_RC


def logits_of(path, windows):
    """Return the logits (tokens, vocabulary) of each window in float64."""
    model = LlamaCpp(path)
    return [model(torch.tensor([one]))[0].double().numpy() for one in windows]


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


def logits_in_a_child(path, tokens):
    """Return the logits of a file; None where llama.cpp refuses it, or aborts.

    A process that forks must not have run llama.cpp: threads of OpenMP end with the fork, and the
    child waits for them. The server that forks here does nothing else.
    """
    answer = path.with_suffix(".npy")
    answer.unlink(missing_ok=True)
    child = _FORKS.Process(target=_save_logits, args=(path, tokens, answer))
    child.start()
    child.join()
    return np.load(answer) if answer.is_file() else None


def _save_logits(path, tokens, answer):
    with suppress(BaseException):  # of a file that is refused
        np.save(answer, logits_of(path, [tokens])[0])


# Places in the parameters of a quantization, in words of four bytes, and what they are by default.
_THREADS, _FILE_TYPE, _HEAD, _EMBEDDINGS, _FLAGS = range(5)
_Q5_1, _F32, _PURE = 9, 0, 1 << 24  # the fourth of the flags, which have a byte each


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
    lambda level, text, data: None
)


class _Parameters(ctypes.Structure):
    """Longer than llama.cpp's, which ends somewhere within."""

    _fields_ = (("words", ctypes.c_uint32 * 128),)


def quantize_file(source, out, file_type, *, pure=False):
    """Write a file as `llama-quantize` does; embeddings and head stay in float32."""
    (path,) = (Path(sys.prefix) / "quantizer").glob("*.so")
    own = ctypes.CDLL(str(path))
    own.llama_log_set(_SILENT, None)
    own.llama_model_quantize_default_params.restype = _Parameters
    parameters = own.llama_model_quantize_default_params()
    words = parameters.words
    assert words[_FILE_TYPE] == _Q5_1
    words[_THREADS], words[_FILE_TYPE] = 1, file_type
    words[_HEAD] = words[_EMBEDDINGS] = _F32
    words[_FLAGS] |= _PURE if pure else 0
    text = ctypes.c_char_p
    own.llama_model_quantize.argtypes = (text, text, ctypes.POINTER(_Parameters))
    done = own.llama_model_quantize(str(source).encode(), str(out).encode(), parameters)
    assert done == 0
