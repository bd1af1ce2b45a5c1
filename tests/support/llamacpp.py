"""ggml's own quantizers and what llama.cpp decodes, through the wheel of xllamacpp."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import numpy as np
import torch

from qaudit.export.llamacpp import LlamaCpp, library


def quantized(kind: str, weight_RC: np.ndarray, importance_C: np.ndarray | None) -> np.ndarray:
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


def dequantized(kind: str, packed_RB: np.ndarray, columns: int) -> np.ndarray:
    """Return the weights that ggml reads in bytes."""
    weight_RC = np.empty((len(packed_RB), columns), np.float32)
    function = getattr(library(), f"dequantize_row_{kind.lower().replace('_k', '_K')}")
    function.restype, function.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    function(packed_RB.ctypes.data, weight_RC.ctypes.data, weight_RC.size)
    return weight_RC


def logits_of(path: Path, windows: list[list[int]]) -> list[np.ndarray]:
    """Return the logits (tokens, vocabulary) of each window in float64."""
    model = LlamaCpp(path)
    return [model(torch.tensor([one]))[0].double().numpy() for one in windows]
