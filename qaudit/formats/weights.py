"""Quantized folders and files: what they say of themselves, and their tensors as dense weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Union

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.header import TensorInfo
from qaudit.checkpoints.safetensors import Headers, WeightFolder, only_pickles, unread_shards
from qaudit.checkpoints.stamps import is_gguf
from qaudit.errors import ConfigurationError, SourceError
from qaudit.formats import reading
from qaudit.formats.arithmetic import in_order
from qaudit.formats.gguf import reading as gguf
from qaudit.formats.gguf.header import read_header
from qaudit.formats.packing import formats, further_readers, reader_named, readers
from qaudit.formats.reading import contradiction, refused
from qaudit.support.lazy import Tensor

_DENSE = ("F64", "F32", "F16", "BF16")
_OF_INPUTS = (".input", ".activation", "._weight_act")
"""How parts begin that may be beside a dense weight, too."""

_COMPARED = (
    "model_type", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads",
    "n_head", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "hidden_act",
    "rope_theta",
)  # fmt: skip
_ALIASES = (
    ("bits", "w_bit"), ("group_size", "q_group_size"), ("sym",), ("zero_point",), ("desc_act",),
    ("checkpoint_format", "format"), ("version",),
)  # fmt: skip
"""Keys of GPTQ and AWQ that decide what weights are decoded to, under all their names."""


QuantizedWeights = Union["QuantizedFolder", gguf.GgufFile]
"""The weights of a quantized folder or file, decoded one at a time."""


def open_quantized(place: Path, *, base: Collection[str] = ()) -> QuantizedWeights:
    return gguf.GgufFile(place, base=base) if is_gguf(place) else QuantizedFolder(place, base=base)


def format_of(folder: Path) -> tuple[str, int, int]:
    """Return the format of a place, and the bits of its codes and of activations. No torch."""
    if is_gguf(folder):
        return "gguf", gguf.GgufFile(folder).bits, 16
    name, reader, config = known_quantization(folder)
    bits, rounding = reader.bits(config), reader.rounding(config)
    if bits is None:
        raise contradiction(f"the quantization configuration of `{name}` has no number of bits")
    return name, bits, (rounding.bits or 16) if isinstance(rounding, reading.Rounding) else 16


def must_match(label: str, folder: Path, base: Path) -> None:
    """Refuse a file of another architecture or another vocabulary than the base has."""
    if is_gguf(folder):
        gguf.must_match(label, read_header(folder), base, folder)
        return
    if (folder / "config.json").is_file() and (base / "config.json").is_file():
        tables = read_configuration(folder), read_configuration(base)
        for key in _COMPARED:
            a, b = (table.get(key) for table in tables)
            if a is not None and b is not None and a != b:
                raise reading.other_model(label, key, a, b, base)
    own_table, base_table = (reading.read_tokenizer(place) for place in (folder, base))
    part = reading.differing_part(own_table, base_table) if own_table and base_table else ""
    if part:
        raise reading.other_tokenizer(label, part, base)


def quantization_of(folder: Path) -> tuple[str, reading.Config] | None:
    """Return the format and the configuration of a folder; None where it is not quantized."""
    config = read_configuration(folder) if (folder / "config.json").is_file() else {}
    for table in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config", "quantization"):
            inner = table.get(key) if isinstance(table, dict) else None
            if isinstance(inner, dict) and inner:
                is_mlx = key == "quantization" or ("mode" in inner and "quant_method" not in inner)
                return _name(inner, "mlx" if is_mlx else ""), inner
    for reader in readers().values():
        if reader.older and (folder / reader.older).is_file():
            config = read_configuration(folder, reader.older)
            return _name(config, reader.name), config
    return None


def _name(config: reading.Config, default: str) -> str:
    method = str(config.get("quant_method") or default).lower()
    aliased = (reader.name for reader in readers().values() if method in reader.aliases)
    return next(aliased, method) or "unnamed"


def known_quantization(folder: Path) -> tuple[str, reading.Reader, reading.Config]:
    """Return a folder's format, its reader and the configuration; refuse one that is not read."""
    quantization = quantization_of(folder)
    if quantization is None:
        raise SourceError(
            f"`{folder}` has no quantization configuration",
            hint="name a full-precision checkpoint as a target, not with `--shipped`",
        )
    name, config = quantization
    # mlx-lm reads `quantization` first, and we `quantization_config`.
    if name == "mlx" and read_configuration(folder).get("quantization", config) != config:
        raise contradiction("`quantization_config` and `quantization` of MLX differ")
    reader = reader_named(name)
    if reader is None:
        raise ConfigurationError(
            f"the format `{name[:60]}` of `{folder}` is not read",
            hint="`pip install qaudit-torchao` reads it"
            if name == "torchao"
            else f"these are: {', '.join([*readers(), *formats().entries, *further_readers()])}",
        )
    sparsity = config.get("sparsity_config")
    kind = str(sparsity.get("format") or "dense") if isinstance(sparsity, dict) else "dense"
    if kind != "dense" or config.get("format") == "marlin-24":
        raise ConfigurationError(
            f"the weights of `{folder}` are stored sparse, as "
            f"`{'marlin-24' if kind == 'dense' else kind[:40]}`",
            hint="only dense codes are read",
        )
    file = reader.older
    older = read_configuration(folder, file) if file and (folder / file).is_file() else {}
    for keys in _ALIASES:  # GPTQModel reads the older file, vLLM `config.json`
        ours, theirs = (
            next((str(table[key]) for key in keys if table.get(key) is not None), None)
            for table in (config, older)
        )
        if ours is not None and theirs is not None and ours.lower() != theirs.lower():
            raise contradiction(
                f"`{file}` has `{keys[0]}: {theirs[:40]}`, "
                f"and `config.json` `{keys[0]}: {ours[:40]}`"
            )
    return name, reader, config


class QuantizedFolder:
    """The weights of a folder that is quantized, as dense tensors under their dense names."""

    def __init__(
        self,
        folder: Path,
        *,
        base: Collection[str] = (),
        infos: Mapping[str, TensorInfo] | None = None,
    ) -> None:
        """Check every linear's stored tensors against each other and the configuration.

        `base` names the tensors of the model that was quantized: what is there besides must be
        of no consequence. `infos` are the headers of files that are not on this machine.
        """
        self.format, reader, config = known_quantization(folder)
        if only_pickles(folder):
            raise ConfigurationError(
                f"the weights of `{folder}` are pickled, and quantized weights are read from "
                "safetensors files alone",
                hint="save the model with safetensors; `--allow-pickle` is for full precision",
            )
        self._files = WeightFolder(folder) if infos is None else Headers(infos)
        if reader.prepare is not None:
            config = reader.prepare(self._files, config)
        self.linears: dict[str, reading.Layout] = {}  # by dense name
        self._keys: dict[str, dict[str, str]] = {}  # dense name -> suffix -> key
        for key in (stored := self._files.infos):
            root = next((root for root in reader.roots if key.endswith(root)), "")
            linear = key.removesuffix(root)
            if root and all(linear + suffix in stored for suffix in reader.beside):
                name = linear + reader.dense
                self.linears[name], self._keys[name] = reader.open(self._files, config, linear)
        if not self.linears:
            raise ConfigurationError(
                f"`{folder}` is said to be quantized by `{self.format}`, and holds no linear of it",
                hint="its configuration and its weights do not belong together",
            )
        rounding = reader.rounding(config)
        if not isinstance(rounding, str):
            rounding = next((layout.left for layout in self.linears.values() if layout.left), "")
        weights_only = (
            f"weights only: the file also quantizes activations ({rounding[:60]}), which stay as "
            "they are here"
        )
        self.notes = tuple(n for n in (rounding and weights_only, unread_shards(folder)) if n)
        """What is not run as it ships."""
        parts = {key for keys in self._keys.values() for key in keys.values()}
        ignored = reader.ignored or ("\0",)
        self._stored = [
            n for n in self._files.names() if n not in parts and not n.endswith(ignored)
        ]
        if base:  # AutoGPTQ wrote a bias of zeros beside every linear
            biases = {f"{name.removesuffix('.weight')}.bias" for name in self.linears} - set(base)
            self._stored = [
                name
                for name in self._stored
                if name not in biases or bool(self._files.read(name).any())
            ]
        self._must_be_whole(reader, frozenset(base))

    @property
    def bits(self) -> int:
        """Return the bits of a code in most weights."""
        return reading.most_bits((layout.bits, layout.shape) for layout in self.linears.values())

    @property
    def decoded_notes(self) -> tuple[str, ...]:
        """What is not run as it ships where weights alone are decoded."""
        rounded = sum(layout.rounding is not None for layout in self.linears.values())
        if not rounded:
            return self.notes
        runtime = f"the file's runtime rounds activations of {rounded} linears"
        return (*self.notes, f"weights only: {runtime}, and the reference does not")

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors, as they are stored."""
        return sum(info.nbytes for info in self._files.infos.values())

    def nbytes_of(self, name: str) -> int:
        """Return the bytes of everything that is stored of a dense tensor."""
        keys = self._keys[name].values() if name in self._keys else (name,)
        return sum(self._files.infos[key].nbytes for key in keys)

    def names(self) -> Sequence[str]:
        return [*self.linears, *self._stored]

    def shape(self, name: str) -> tuple[int, ...]:
        linear = self.linears.get(name)
        return linear.shape if linear else self._files.shape(name)

    def read(self, name: str) -> Tensor:
        if name not in self.linears:
            return self._files.read(name)
        layout = self.linears[name]
        weight = layout.decode({s: self._files.read(key) for s, key in self._keys[name].items()})
        if tuple(weight.shape) != layout.shape:
            raise refused(name, f"decodes to {list(weight.shape)}, not to {list(layout.shape)}")
        return weight

    def groups(self, name: str) -> Tensor | None:
        layout = self.linears.get(name)
        if layout is None or not layout.size:
            return None
        for suffix in (".g_idx", ".weight_g_idx"):
            key = self._keys[name].get(suffix)
            if key is not None and int((order := self._files.read(key)).min()) >= 0:
                return order.long()
        return in_order(layout.shape[1], layout.size)

    def _must_be_whole(self, kind: reading.Reader, base: frozenset[str]) -> None:
        """Refuse codes without what decodes them, and parts of a linear without its codes."""
        parts = tuple(suffix for suffix in kind.suffixes if suffix != kind.dense)
        for key in self._stored:
            info = self._files.infos[key]
            suffix = next((part for part in parts if key.endswith(part) and key not in base), "")
            if suffix and not suffix.startswith(_OF_INPUTS):
                name = key.removesuffix(suffix) + kind.dense
                raise refused(name, f"has a `{suffix.lstrip('._')}`, and not all that decodes it")
            is_weight = key in base or key.endswith(".weight")
            if info.dtype not in _DENSE and (is_weight or info.dtype.startswith("F")):
                needed = " or ".join(f"`{root.lstrip('._')}`" for root in kind.roots)
                raise refused(key, f"is stored as `{info.dtype}` and has no {needed}")
