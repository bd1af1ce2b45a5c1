"""The tensors of a quantized folder as a dense checkpoint has them, decoded one at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from qaudit.checkpoints.configuration import read_configuration
from qaudit.checkpoints.header import TensorInfo
from qaudit.checkpoints.safetensors import Headers, WeightFolder, only_pickles, unread_shards
from qaudit.errors import ConfigurationError, SourceError
from qaudit.formats.arithmetic import in_order
from qaudit.formats.reading import (
    Config,
    Layout,
    Reader,
    contradiction,
    most_bits,
    open_linear,
    refused,
)
from qaudit.formats.registry import formats, further_readers, reader_named, readers
from qaudit.support.lazy import Tensor

_DENSE = ("F64", "F32", "F16", "BF16")
_OF_INPUTS = (".input", ".activation", "._weight_act")
"""How parts begin that may be beside a dense weight, too."""

_WEIGHTS_ONLY = (
    "weights only: the file also quantizes activations ({}), which stay as they are here"
)


def quantization_of(folder: Path) -> tuple[str, Config] | None:
    """Return the format and the configuration of a folder; None where it is not quantized."""
    config = read_configuration(folder) if (folder / "config.json").is_file() else {}
    for table in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config", "quantization"):
            quantization = table.get(key) if isinstance(table, dict) else None
            if isinstance(quantization, dict) and quantization:
                mlx_like = key == "quantization" or (
                    "mode" in quantization and "quant_method" not in quantization
                )
                return _name(quantization, "mlx" if mlx_like else ""), quantization
    for reader in readers().values():
        if reader.older and (folder / reader.older).is_file():
            quantization = read_configuration(folder, reader.older)
            return _name(quantization, reader.name), quantization
    return None


def known_quantization(folder: Path) -> tuple[str, Reader, Config]:
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
            hint=IN_PLUGINS[name]
            if name in IN_PLUGINS
            else f"these are: {', '.join([*readers(), *formats().entries, *further_readers()])}",
        )
    if reader.older and (folder / reader.older).is_file():
        _must_agree(config, read_configuration(folder, reader.older), reader.older)
    return name, reader, config


IN_PLUGINS = {"torchao": "`pip install qaudit-torchao` reads it"}
"""Formats that distributions beside this one read."""

_ALIASES = (
    ("bits", "w_bit"),
    ("group_size", "q_group_size"),
    ("sym",),
    ("zero_point",),
    ("desc_act",),
    ("checkpoint_format", "format"),
    ("version",),
)
"""Keys of GPTQ and AWQ that decide what weights are decoded to, under all their names."""


def _must_agree(config: Config, older: Config, file: str) -> None:
    """Refuse two configurations that differ: GPTQModel reads the older file, vLLM `config.json`."""
    for keys in _ALIASES:
        ours, theirs = (
            next((table[key] for key in keys if table.get(key) is not None), None)
            for table in (config, older)
        )
        if None not in (ours, theirs) and str(ours).lower() != str(theirs).lower():
            raise contradiction(
                f"`{file}` has `{keys[0]}: {str(theirs)[:40]}`, "
                f"and `config.json` `{keys[0]}: {str(ours)[:40]}`"
            )


def _name(config: Mapping[str, Any], default: str) -> str:
    method = str(config.get("quant_method") or default).lower()
    aliased = (reader.name for reader in readers().values() if method in reader.aliases)
    return next(aliased, method) or "unnamed"


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
        _refuse_sparse(config, folder)
        if only_pickles(folder):
            raise ConfigurationError(
                f"the weights of `{folder}` are pickled, and quantized weights are read from "
                "safetensors files alone",
                hint="save the model with safetensors; `--allow-pickle` is for full precision",
            )
        self._files = WeightFolder(folder) if infos is None else Headers(infos)
        if reader.prepare is not None:
            config = reader.prepare(self._files, config)
        self._layouts: dict[str, Layout] = {}
        self._keys: dict[str, dict[str, str]] = {}  # dense name -> suffix -> key
        self._find(reader, config)
        if not self._layouts:
            raise ConfigurationError(
                f"`{folder}` is said to be quantized by `{self.format}`, and holds no linear of it",
                hint="its configuration and its weights do not belong together",
            )
        rounding = reader.rounding(config)
        if not isinstance(rounding, str):
            rounding = next((layout.left for layout in self._layouts.values() if layout.left), "")
        weights_only = _WEIGHTS_ONLY.format(rounding[:60]) if rounding else None
        self.notes = tuple(note for note in (weights_only, unread_shards(folder)) if note)
        """What is not run as it ships."""
        self._stored = self._as_stored(reader, frozenset(base))
        self._must_be_whole(reader, frozenset(base))

    @property
    def linears(self) -> Mapping[str, Layout]:
        """What is quantized, by dense name."""
        return self._layouts

    @property
    def bits(self) -> int:
        """Return the bits of a code in most weights."""
        return most_bits((layout.bits, layout.shape) for layout in self._layouts.values())

    @property
    def decoded_notes(self) -> tuple[str, ...]:
        """What is not run as it ships where weights alone are decoded."""
        rounded = sum(layout.rounding is not None for layout in self._layouts.values())
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
        return [*self._layouts, *self._stored]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._layouts:
            return self._layouts[name].shape
        return self._files.shape(name)

    def read(self, name: str) -> Tensor:
        if name not in self._layouts:
            return self._files.read(name)
        layout = self._layouts[name]
        weight = layout.decode({s: self._files.read(key) for s, key in self._keys[name].items()})
        if tuple(weight.shape) != layout.shape:
            raise refused(name, f"decodes to {list(weight.shape)}, not to {list(layout.shape)}")
        return weight

    def groups(self, name: str) -> Tensor | None:
        layout = self._layouts.get(name)
        if layout is None or not layout.size:
            return None
        for suffix in (".g_idx", ".weight_g_idx"):
            key = self._keys[name].get(suffix)
            if key is not None and int((order := self._files.read(key)).min()) >= 0:
                return order.long()
        return in_order(layout.shape[1], layout.size)

    def _find(self, kind: Reader, config: Config) -> None:
        infos = self._files.infos
        for key in infos:
            root = next((one for one in kind.roots if key.endswith(one)), None)
            if root is None:
                continue
            base = key.removesuffix(root)
            if any(base + suffix not in infos for suffix in kind.beside):
                continue
            name = base + kind.dense
            self._layouts[name], self._keys[name] = open_linear(self._files, kind, config, base)

    def _must_be_whole(self, kind: Reader, base: frozenset[str]) -> None:
        """Refuse codes without what decodes them, and parts of a linear without its codes."""
        parts = tuple(one for one in kind.suffixes if one != kind.dense)
        for key in self._stored:
            info = self._files.infos[key]
            suffix = next((one for one in parts if key.endswith(one) and key not in base), "")
            if suffix and not suffix.startswith(_OF_INPUTS):
                name = key.removesuffix(suffix) + kind.dense
                raise refused(name, f"has a `{suffix.lstrip('._')}`, and not all that decodes it")
            is_weight = key in base or key.endswith(".weight")
            if info.dtype not in _DENSE and (is_weight or info.dtype.startswith("F")):
                needed = " or ".join(f"`{root.lstrip('._')}`" for root in kind.roots)
                raise refused(key, f"is stored as `{info.dtype}` and has no {needed}")

    def _as_stored(self, kind: Reader, base: frozenset[str]) -> tuple[str, ...]:
        parts = {key for keys in self._keys.values() for key in keys.values()}
        dense = []
        for name in self._files.names():
            if name in parts or name.endswith(kind.ignored or ("\0",)):
                continue
            if base and name not in base and self._is_zero_bias(name):
                continue
            dense.append(name)
        return tuple(dense)

    def _is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias of zeros, which AutoGPTQ wrote beside every linear."""
        stem, dot, last = name.rpartition(".")
        if f"{stem}.weight" not in self._layouts or last != "bias" or not dot:
            return False
        return not bool(self._files.read(name).any())


def _refuse_sparse(config: Config, folder: Path) -> None:
    sparsity = config.get("sparsity_config")
    kind = str(sparsity.get("format") or "dense") if isinstance(sparsity, dict) else "dense"
    packing = str(config.get("format") or "")
    if kind != "dense" or packing == "marlin-24":
        raise ConfigurationError(
            f"the weights of `{folder}` are stored sparse, as "
            f"`{(packing if kind == 'dense' else kind)[:40]}`",
            hint="only dense codes are read",
        )
