"""A scheme, a merge, a format of files and a diagnostic, in a distribution of their own."""

from dataclasses import dataclass

from qaudit.core.linears import IntegerCodes, decoded, refuse_nonfinite
from qaudit.core.merge import Merge
from qaudit.core.scheme import Scheme
from qaudit.formats.compressed_tensors import CompressedTensors


@dataclass(frozen=True, kw_only=True)
class Ternary(Scheme):
    """Keep the sign of large weights, and set the others to zero."""

    name = "ternary"
    code_bits = 2

    def quantize(self, linears):
        refuse_nonfinite(linears)
        stored = {}
        for name, w in linears.weights.items():
            scale = w.abs().mean(1, keepdim=True).bfloat16()
            codes = ((w > scale / 2).byte() - (w < -scale / 2).byte() + 2).byte()
            stored[name] = IntegerCodes(codes, scale, None, bits=2, group=w.shape[1])
        return decoded(linears, stored)


@dataclass(frozen=True, kw_only=True)
class Middle(Merge):
    """Take the member in the middle."""

    name = "middle"

    def merge(self, tensors, weights):
        return tensors[len(tensors) // 2].clone()


class TernaryFiles(CompressedTensors):
    """The same files, for a runtime of its own."""

    name = "ternary"
