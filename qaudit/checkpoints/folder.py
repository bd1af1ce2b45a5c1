"""Local folders -> checkpoints, in the order in which they were trained.

A target is one Hugging Face checkpoint, or a folder whose sub-folders are. The family is that of
a `qaudit-family.yaml` in the series' folder, or the one a recipe names; it is not guessed from an
architecture or from names that look like those of a family.

Weight files are identified by the sha256 of their bytes, read in a stream and without torch,
and not read again while they stay as they are.
A damaged file has a hash like any other: reading its tensors refuses it, and the rest of the
series is measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from qaudit.checkpoints import series
from qaudit.checkpoints.adapters import read_adapter
from qaudit.checkpoints.configuration import WITHOUT_CONFIGURATION
from qaudit.checkpoints.safetensors import (
    ADAPTER,
    is_adapter,
    only_dcp,
    unread_shards,
    weight_files,
)
from qaudit.checkpoints.stamps import hash_of, own_folder, settings_in
from qaudit.errors import SourceError, UsageError
from qaudit.families import FAMILY_FILE, Family, load, load_file
from qaudit.families.family import parse_name
from qaudit.support.keys import first_of, nearest
from qaudit.types import Checkpoint, Recipe, Ref, WeightFile
from qaudit.whole import open_regular

DEMO = "demo"
"""The target that means the series shipped with this installation."""


_GLANCES, _GLANCE_NBYTES = 16, 4096


def shipped_series() -> Path:
    return Path(__file__).resolve().parent.parent / "demo"


def find_all(
    targets: Sequence[str], recipe: Recipe | None = None, *, hashed: bool = True
) -> tuple[Checkpoint, ...]:
    """Return the checkpoints of every target under labels that differ.

    Targets that are one checkpoint each are one series and are put in order together; a folder
    of checkpoints keeps its own order, at the place where it is named.
    """
    checkpoints = series.as_series(look(target, recipe) for target in targets)
    return with_hashes(checkpoints) if hashed else checkpoints


def look(target: str, recipe: Recipe | None = None) -> series.CheckpointGroup:
    """Return the checkpoints of a target, before any name is read."""
    folder = _existing(target)
    places, family = _checkpoints_in(folder), _family_in((folder, folder.absolute().parent))
    if family is None and recipe is not None and recipe.family is not None:
        family = load(recipe.family)
    knowledge = series.Knowledge.of(family, recipe)
    candidates = [
        series.Candidate(
            Ref(str(place)), name, (name,), knowledge, state=series.read_trainer_state(place)
        )
        for place, name in places
    ]
    alone = [place for place, _ in places] == [folder]
    if not alone and (runs := _nested_runs(folder)):
        named = f"{first_of(runs)} {'is' if len(runs) == 1 else 'are'}"
        note = f"{named} left out, with checkpoints inside: name them as targets, too"
        candidates[0] = replace(candidates[0], notes=(note,))
    texts = (*recipe.checkpoints, *recipe.soups) if recipe is not None else ()
    whole = candidates[-1]
    if len(places) > 1 and places[-1][0] == folder and not any(whole.label in t for t in texts):
        # HF Trainer saves the final model beside `checkpoint-N`; a copy without a step of its own
        # would otherwise be placed behind the checkpoint that it is.
        for k, part in reversed([*enumerate(candidates[:-1])]):
            if is_copy(Path(whole.ref.location), Path(part.ref.location)):
                note = f"`{whole.label}` holds the weights of `{part.label}`: one row for both"
                candidates[k:] = [replace(part, notes=(note,)), *candidates[k + 1 : -1]]
                break
    return series.CheckpointGroup(tuple(candidates), alone)


def with_hashes(checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Read every weight file and small file once and keep the hash of its bytes."""
    return tuple(_with_files(c, own_folder(c)) for c in checkpoints)


def _with_files(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Hash its files; none if one cannot be read: opening it raises the reason."""
    doubt = unread_shards(folder)
    suspect = (*checkpoint.suspect, doubt) if doubt else checkpoint.suspect
    files: tuple[WeightFile, ...] = ()
    with suppress(OSError):
        files = tuple(
            WeightFile(p.relative_to(folder).as_posix(), p.stat().st_size, hash_of(p))
            for p in weight_files(folder)
        )
    read = replace(checkpoint, files=files, settings=settings_in(folder), suspect=suspect)
    parent = folder.absolute().parent
    is_alone = (folder / "config.json").is_file() or not (parent / "config.json").is_file()
    if is_alone or only_dcp(folder) is None:
        return read
    base = Checkpoint(Ref(str(parent)), parent.name, settings=settings_in(parent))
    return replace(read, base=base, settings=base.settings)


def with_base(
    checkpoint: Checkpoint, find_on_hub: Callable[[str, str | None], Checkpoint]
) -> Checkpoint:
    """Return an adapter with the model that it changes: a folder on this machine, or of the Hub."""
    if not holds_adapter(checkpoint):
        return checkpoint
    where, revision = _base_of(own_folder(checkpoint))
    if isinstance(where, Path):
        base = _with_files(Checkpoint(Ref(str(where)), where.resolve().name), where)
    else:
        base = find_on_hub(where, revision)
    return replace(checkpoint, base=base, settings=base.settings)


def holds_adapter(checkpoint: Checkpoint) -> bool:
    """Return whether the files that are read of a checkpoint are those of an adapter."""
    return any(file.name == ADAPTER for file in checkpoint.files)


def has_base_on_hub(target: str) -> bool:
    """Return whether a folder holds adapters, of which one was trained on a model of the Hub."""
    folder = shipped_series() if target == DEMO else Path(target)
    places = (folder, *folder.iterdir()) if folder.is_dir() else ()
    adapters = [place for place in places if place.is_dir() and is_adapter(place)]
    return any(not isinstance(_base_of(place)[0], Path) for place in adapters)


def _base_of(folder: Path) -> tuple[Path | str, str | None]:
    """Return the folder of an adapter's base, or its repository and revision."""
    settings = read_adapter(folder)
    if settings.base is None:
        raise SourceError(
            f"`{folder / ADAPTER}` does not name the model that the adapter was trained on",
            hint="write its folder or its repository there, as `base_model_name_or_path`",
        )
    for place in (Path(settings.base), folder / settings.base):
        if (place / "config.json").is_file():
            return place, None
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", settings.base):
        return settings.base, settings.revision
    raise SourceError(
        f"`{folder}` is an adapter of `{settings.base}`, which is not here",
        hint=f"put that model there, or write where it is into `{folder / ADAPTER}`, as "
        "`base_model_name_or_path`",
    )


def weights_nbytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of the weights of a checkpoint, without reading them."""
    with suppress(OSError):
        return sum(path.stat().st_size for path in weight_files(own_folder(checkpoint)))
    return 0


def _existing(target: str) -> Path:
    if target == DEMO:
        return shipped_series()
    folder = Path(target)
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf" and folder.exists():
        raise UsageError(
            f"`{target}` is a quantized file, which is compared with the model it was made from",
            hint=f"name that model's folder, and the file beside it: `--shipped {target}`",
        )
    if folder.exists():
        raise UsageError(
            f"`{target}` is a file, and a folder is needed",
            hint="name the folder of a checkpoint, the one with `config.json` in it",
        )
    near = near_folder(folder) or "name a folder with checkpoints in it, a recipe file, or `demo`"
    raise UsageError(f"there is no folder `{target}`", hint=near)


def near_folder(folder: Path) -> str:
    """Return `did you mean` and the folder beside a missing one with nearly its name, if any."""
    parent = folder.parent
    siblings = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
    near = nearest(folder.name, siblings) if siblings else ""
    return near if near.startswith("did you mean") else ""


def _checkpoints_in(folder: Path) -> list[tuple[Path, str]]:
    """Return a target itself, or its sub-folders that are checkpoints.

    A checkpoint with numbered ones beneath it is the end of their series, as HF Trainer
    leaves it; folders of any other name inside a checkpoint are not looked at.
    """
    subfolders = [
        (place, sub.name) for sub in _subfolders(folder) if (place := _checkpoint_at(sub))
    ]
    itself = (folder, folder.resolve().name)
    if (folder / "config.json").is_file() or is_adapter(folder):
        numbered = [(place, name) for place, name in subfolders if not parse_name(name).named]
        return [*numbered, itself] if weight_files(folder) or not numbered else numbered
    if subfolders:
        return subfolders
    if not any(folder.iterdir()):
        raise UsageError(f"`{folder}` is empty", hint="name a folder with checkpoints in it")
    hint = "a checkpoint is a folder with `config.json` and its weights as safetensors"
    if only_dcp(folder):
        hint = WITHOUT_CONFIGURATION
    if weight_files(folder):
        raise SourceError(f"`{folder}` holds weights and no `config.json`", hint=hint)
    if runs := _nested_runs(folder):
        hint = f"its sub-folders have some: name them as targets, as `{folder / runs[0]}`"
    raise UsageError(f"there is no checkpoint in `{folder}`", hint=hint)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _nested_runs(folder: Path) -> list[str]:
    return [
        sub.name
        for sub in _subfolders(folder)
        if _checkpoint_at(sub) is None
        and any((below / "config.json").is_file() for below in sub.iterdir() if below.is_dir())
    ]


def _checkpoint_at(folder: Path) -> Path | None:
    """Return where in a sub-folder its checkpoint is: there, or in its only sub-folder.

    Weights without a `config.json` count, so that they are skipped by name and not in silence.
    """
    if (folder / "config.json").is_file() or weight_files(folder):
        return folder
    inside = _subfolders(folder)
    if len(inside) == 1 and (inside[0] / "config.json").is_file():
        return inside[0]
    return None


def family_of(checkpoint: Checkpoint, name: str) -> Family:
    """Return the family of a checkpoint by its name: of a file beside it, or of those that ship."""
    folder = own_folder(checkpoint).absolute()
    around = (folder, *list(folder.parents)[:3]) if checkpoint.commit is None else ()
    beside = _family_in(around)
    return beside if beside is not None and beside.family == name else load(name)


def _family_in(folders: Iterable[Path]) -> Family | None:
    files = (folder / FAMILY_FILE for folder in folders)
    return next((load_file(file) for file in files if file.is_file()), None)


def is_copy(one: Path, other: Path) -> bool:
    """Return whether two folders hold equal weights; nothing is hashed that differs at a glance."""
    files = [weight_files(folder) for folder in (one, other)]
    if not files[0] or [p.name for p in files[0]] != [p.name for p in files[1]]:
        return False
    pairs = [*zip(*files, strict=True)]
    with suppress(OSError):
        alike = all(_glance(a) == _glance(b) for a, b in pairs)
        return alike and all(hash_of(a) == hash_of(b) for a, b in pairs)
    return False


def _glance(path: Path) -> tuple[int, list[bytes]]:
    """Return the size of a file and a few of its bytes, spread over it."""
    size, parts = path.stat().st_size, []
    with open_regular(path) as file:
        for k in range(_GLANCES):
            file.seek(size * k // _GLANCES)
            parts.append(file.read(_GLANCE_NBYTES))
    return size, parts
