"""The weights of a folder: headers alone, and the bytes of one tensor at a time.

A tensor is read by its byte range into memory of its own. Mapping whole files would count their
pages as ours and make a memory bound impossible to keep, and a plain read lets a thread read the
next block without a page fault in the one that computes.

Every checkpoint is checked where it is read: header against file size, index against shards, and
values against NaN and infinity.

A pickled `.bin` file is a program, which Python's own loader runs, so it is refused unless allowed,
and then read by a loader that takes nothing but tensors. `weights_only=True` runs
none of it: whatever is not a tensor, a plain container or a number is refused. Old checkpoints
keep masks as bytes and weights as halves among them, which are tensors like any other. Files
of the zip format are mapped and not read; those of the format before it cannot be, and take
their size in memory.

What is written are files of at most so many bytes, one after the other.
"""

from __future__ import annotations

import json
import shutil
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from qaudit.checkpoints import header
from qaudit.checkpoints.configuration import METADATA, dcp_folder, read_configuration, unreadable
from qaudit.checkpoints.header import TORCH_NAMES, DcpFolder, TensorInfo, damaged
from qaudit.errors import ConfigurationError, MachineError, SourceError, not_written
from qaudit.support.keys import first_of
from qaudit.support.lazy import Tensor, torch
from qaudit.types import Checkpoint
from qaudit.whole import open_regular, read_regular

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLE_INDEX, PICKLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"


def headers(
    folder: Path, without: Collection[str] = (), single: str = ""
) -> Mapping[str, TensorInfo]:
    """Return every tensor of a folder's safetensors files, or of a single one, by name.

    Shards that hold nothing but tensors that are left out may be missing.
    """
    if not single and (place := only_dcp(folder)):
        return DcpFolder(place).infos
    tensors: dict[str, TensorInfo] = {}
    placed = {} if single else _placed(folder, without)
    for file in [single] if single else sorted(set(placed.values())) or [SINGLE]:
        for name, info in header.tensors_in(folder / file, *_read_header(folder / file)).items():
            if name in without:
                continue
            if name in tensors:
                raise _twice(name, tensors[name].file, file)
            tensors[name] = info
    for name, file in placed.items():
        if name not in tensors or tensors[name].file != file:
            raise SourceError(
                f"`{INDEX}` places tensor `{name}` in `{file}`, which does not hold it",
                hint="download the index and the shards again; they belong to different versions",
            )
    return tensors


def _twice(name: str, *files: str) -> SourceError:
    return SourceError(
        f"tensor `{name}` is in both `{files[0]}` and `{files[1]}`",
        hint="keep the shards of one checkpoint only in the folder",
    )


def _missing(file: str, index: str, folder: Path) -> SourceError:
    return SourceError(
        f"shard `{file}` is named in {index} and not in `{folder}`",
        hint="download the missing shard",
    )


class WeightFolder:
    """The tensors of one checkpoint, read one at a time; may be read from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        allow_pickle: bool = False,
        without: Collection[str] = (),
        single: str = "",
    ) -> None:
        """Open `folder`, or a single file of it; read `.bin` files only if `allow_pickle`."""
        self._folder = folder
        self._read: Callable[[str], Tensor] | None = None  # of pickles, which have no byte ranges
        self._headers: Mapping[str, TensorInfo]
        pickles = [] if single or not only_pickles(folder) else _pickle_files(folder)
        if allow_pickle and (pickles or single.endswith(".bin")):
            pickled = load_pickles(folder, pickles or [single])
            self._read = lambda name: pickled[name][0].clone()
            self._headers = {
                name: TensorInfo("", tuple(tensor.shape), file, 0, tensor.nbytes)
                for name, (tensor, file) in pickled.items()
            }
        elif not single and (place := only_dcp(folder)):
            dcp = DcpFolder(place)
            self._read, self._headers = dcp.read, dcp.infos
        else:
            self._headers = headers(folder, without, single)

    def names(self) -> Sequence[str]:
        return list(self._headers)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._headers[name].shape

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Where each tensor is; nothing of those in pickles or distributed checkpoints."""
        return self._headers if self._read is None else {}

    def metadata(self) -> Mapping[str, str]:
        """Return the texts of all headers; nothing of pickled files."""
        texts: dict[str, str] = {}
        for file in sorted({info.file for info in self.infos.values()}):
            path = self._folder / file
            table = header.table_in(path, _read_header(path)[0]).get("__metadata__") or {}
            if not isinstance(table, dict) or not all(isinstance(t, str) for t in table.values()):
                raise damaged(f"the metadata of `{path}` is not a table of texts")
            texts |= table
        return texts

    def raw(self, name: str) -> bytes:
        """Read the bytes of a small tensor, without torch."""
        info = self._headers[name]
        buffer = bytearray(info.nbytes)
        _fill(memoryview(buffer), self._folder / info.file, info)
        return bytes(buffer)

    def read(self, name: str) -> Tensor:
        """Read a tensor as it is stored, and refuse NaN and infinity."""
        info = self._headers[name]
        if self._read is not None:
            tensor = self._read(name)
        else:
            path = self._folder / info.file
            if info.dtype not in TORCH_NAMES:
                raise SourceError(
                    f"tensor `{name}` in `{path}` is stored as `{info.dtype}`",
                    hint="audit the checkpoint before it was quantized: bf16, fp16 or fp32",
                )
            raw = torch.empty(info.nbytes, dtype=torch.uint8)
            _fill(memoryview(raw.numpy().data), path, info)
            tensor = raw.view(getattr(torch, TORCH_NAMES[info.dtype])).reshape(info.shape)
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        wide = tensor.float() if tensor.itemsize == 1 else tensor  # 8 bits have no arithmetic
        lowest, highest = torch.aminmax(wide)  # one pass, no mask in memory; NaN comes through
        if not bool(torch.isfinite(lowest) & torch.isfinite(highest)):
            count = int((~torch.isfinite(wide)).sum())
            raise SourceError(
                f"tensor `{name}` in `{info.file}` holds NaN or infinity "
                f"({count} of {wide.numel()})",
                hint="this checkpoint diverged or is damaged; audit another one",
            )
        return tensor


class Headers(WeightFolder):
    """Tensors of which only the headers were read, as of files that are still on the Hub."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self._folder, self._read, self._headers = Path(), None, dict(infos)

    def raw(self, name: str) -> NoReturn:
        raise SourceError(f"`{name}` is not on this machine", hint="download the weights first")

    read = raw


def unread_tensors(places: Iterable[Path], checkpoints: Iterable[Checkpoint]) -> frozenset[str]:
    """Return the tensors of files that are not downloaded, of all members of a soup."""
    return frozenset(
        name
        for folder, checkpoint in zip(places, checkpoints, strict=True)
        if (files := {file.name for file in checkpoint.unread})
        for name, file in weight_map(folder / INDEX).items()
        if file in files
    )


def _placed(folder: Path, without: Collection[str]) -> Mapping[str, str]:
    """Return the file of each tensor by the index; nothing where one file holds all.

    A single file comes first, as in transformers.
    """
    config = read_configuration(folder) if (folder / "config.json").is_file() else {}
    if (other := config.get("transformers_weights")) is not None:
        raise ConfigurationError(
            f"`config.json` of `{folder}` names its weights `{str(other)[:60]}` "
            "(`transformers_weights`), which is not read",
            hint=f"name them `{SINGLE}` or `{INDEX}`, and remove the key",
        )
    if (folder / SINGLE).is_file():
        return {}
    if placed := weight_map(folder / INDEX):
        placed = {name: file for name, file in placed.items() if name not in without}
        for file in sorted(set(placed.values())):
            if not (folder / file).is_file():
                raise _missing(file, f"`{INDEX}`", folder)
        return placed
    if _pickle_files(folder):
        raise SourceError(
            f"`{folder}` holds pickled weights only, and opening a pickle can run code",
            hint="pass `--allow-pickle` if you trust where it comes from",
        )
    raise SourceError(
        f"no weights in `{folder}`", hint=f"a checkpoint folder holds `{SINGLE}` or `{INDEX}`"
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files that are read, as far as they exist; never raise for damaged ones.

    The configuration of an adapter is among them: it holds the scale of what the adapter adds.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if named := _named_by(folder / INDEX):
        return named
    if is_adapter(folder):
        return [p for n in (ADAPTER, *ADAPTER_WEIGHTS) if (p := folder / n).is_file()][:2]
    if plain := sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin")):
        return plain
    place = dcp_folder(folder)
    return [place / METADATA, *sorted(place.glob("*.distcp"))] if place else []


def unread_shards(folder: Path) -> str | None:
    """Return the doubt about a folder whose index names other files than the one that is read."""
    is_single = (folder / SINGLE).is_file()
    shards = [p.name for p in _named_by(folder / INDEX) if is_single and p.name != SINGLE]
    return shards_beside(SINGLE, INDEX, shards)


def shards_beside(single: str, index: str, shards: Sequence[str]) -> str | None:
    """Return the doubt about shards beside a single file; None where there are none."""
    if not shards:
        return None
    return (
        f"`{single}` is read, as transformers does, and {first_of(shards, 1)}, which `{index}` "
        "names, is not"
    )


def _named_by(index: Path) -> list[Path]:
    with suppress(SourceError):
        paths = {index.with_name(file) for file in weight_map(index).values()}
        return sorted(path for path in paths if path.is_file())
    return []


def _pickle_files(folder: Path) -> list[str]:
    if (folder / PICKLE).is_file():
        return [PICKLE]
    return sorted(set(weight_map(folder / PICKLE_INDEX).values()))


def _has_safetensors(folder: Path) -> bool:
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter, and no whole model."""
    return (folder / ADAPTER).is_file() and not _has_safetensors(folder)


def only_pickles(folder: Path) -> bool:
    """Return whether the weights of a folder are pickled, and in no other file."""
    return not _has_safetensors(folder) and bool(_pickle_files(folder))


def only_dcp(folder: Path) -> Path | None:
    """Return where a folder's distributed checkpoint is, if it holds no weights of other kinds."""
    place = dcp_folder(folder)
    return place if place and METADATA in {path.name for path in weight_files(folder)} else None


def weight_map(index: Path) -> Mapping[str, str]:
    """Return the file of each tensor by an index, or nothing without one."""
    if not index.is_file():
        return {}
    try:
        placed = json.loads(read_regular(index).decode())["weight_map"]
        pairs = {str(name): str(file) for name, file in placed.items()}
        if not pairs:
            raise ValueError("no tensor")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(f"`{index}` is not an index of weights") from error
    for file in pairs.values():
        if Path(file).name != file:
            raise SourceError(
                f"`{index}` points outside its folder, to `{file}`",
                hint="an index names files of its own folder",
            )
    return pairs


def _read_header(path: Path) -> tuple[bytes, int]:
    """Return the bytes of a header, and those of the file."""
    try:
        size = path.stat().st_size
        with open_regular(path) as file:
            return file.read(header.header_nbytes(path, file.read(8), size)), size
    except OSError as error:
        raise header.not_read(path, error) from error


def _fill(view: memoryview, path: Path, info: TensorInfo) -> None:
    place, end = info.start, info.start + info.nbytes
    with open_regular(path) as file:
        file.seek(place)
        while place < end:
            count = file.readinto(view[place - info.start :])
            if not count:
                raise header.cut_short(path, expected=end, found=place)
            place += count


def load_pickles(folder: Path, files: Sequence[str]) -> Mapping[str, tuple[Tensor, str]]:
    tensors: dict[str, tuple[Tensor, str]] = {}
    for file in files:
        path = folder / file
        if not path.is_file():
            raise _missing(file, "an index", folder)
        hint = "convert it to safetensors where it was made"
        with unreadable(f"`{path}` cannot be read as pickled tensors", hint, SourceError):
            mapped = zipfile.is_zipfile(path)
            with warnings.catch_warnings(action="ignore"):  # of pickles newer than torch writes
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
            if not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
                raise ValueError("something in it is no tensor")
        for name, tensor in loaded.items():
            if str(name) in tensors:
                raise _twice(str(name), tensors[str(name)][1], file)
            tensors[str(name)] = tensor.detach(), file
    return tensors


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a file of tensors, whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), partial, metadata=dict(metadata))
        partial.replace(path)
    except OSError as error:
        raise not_written(path, error) from error
    except SafetensorError as error:  # raised for a full disk, too
        raise MachineError(
            f"`{path}` cannot be written: {error}",
            hint="free some space on this disk and run the same command again",
        ) from error


class ShardWriter:
    """Files of weights in a folder, with an index where they are several.

    A file is written as soon as it is full. Its name says how many there are, and comes last.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        """Write files of `nbytes` at most; a tensor is never split, so one may be larger."""
        self._folder, self._limit = folder / "shards", nbytes
        self._tensors: dict[str, Tensor] = {}
        self._number_of: dict[str, int] = {}  # of the file that holds a tensor
        self._nbytes = self._total = 0
        self.paths: list[Path] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if self._tensors and self._nbytes + tensor.nbytes > self._limit:
                self.write()
            self._tensors[name], self._number_of[name] = tensor, len(self.paths)
            self._nbytes += tensor.nbytes
            self._total += tensor.nbytes

    def write(self) -> None:
        """Write what was added and is in memory."""
        if self._tensors:
            path = self._folder / f"{len(self.paths):05}" / SINGLE
            save_tensors(self._tensors, path, {"format": "pt"})
            self.paths.append(path)
            self._tensors, self._nbytes = {}, 0

    def finish(self) -> None:
        """Give the files the names of a checkpoint's."""
        self.write()
        count = len(self.paths)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        names = [SINGLE] if count == 1 else names
        for path, name in zip(self.paths, names, strict=True):
            path.replace(self._folder.parent / name)
        if count > 1:
            placed = {name: names[number] for name, number in self._number_of.items()}
            index = {"metadata": {"total_size": self._total}, "weight_map": placed}
            text = json.dumps(index, indent=2) + "\n"
            (self._folder.parent / INDEX).write_text(text, encoding="utf-8")
        self.remove()

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
