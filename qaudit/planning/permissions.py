"""What a person must allow before anything is fetched: pickled weights, and code of a repository.

Both can run a stranger's program, so neither is a default, and a scan that needs one says so
from names and configurations, while it still costs nothing. What is allowed is allowed for the
whole scan and is part of its plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qaudit import families
from qaudit.checkpoints.configuration import is_own_code
from qaudit.errors import UsageError
from qaudit.families.family import Need
from qaudit.types import Checkpoint


@dataclass(frozen=True)
class _Permission:
    """Something that is never done unless it is permitted."""

    need: Need  # as in `Checkpoint.requires`
    flag: str
    because: str
    means: str
    done: str


_PERMISSIONS = (
    _Permission(
        need="pickle",
        flag="--allow-pickle",
        because="has its weights as pickles only, and opening a pickle can run code",
        means="they are then read with a loader that takes nothing but tensors",
        done="pickled weights are read, with a loader that takes nothing but tensors",
    ),
    _Permission(
        need="remote_code",
        flag="--trust-remote-code",
        because="has its model as code of its own, which is not run unless asked for",
        means="that Python then runs on this machine with all your rights: read it first",
        done="code of the repository is run on this machine",
    ),
)


def refuse(
    checkpoints: Sequence[Checkpoint], *, allow_pickle: bool, trust_remote_code: bool
) -> None:
    allowed = {"pickle": allow_pickle, "remote_code": trust_remote_code}
    refused = [
        (permission, needing)
        for permission, needing in _needing(checkpoints)
        if not allowed[permission.need]
    ]
    if not refused:
        return
    reasons = [f"{_some(needing)} {p.because}{_why(p, needing)}" for p, needing in refused]
    flags = " ".join(f"`{p.flag}`" for p, _ in refused)
    raise UsageError(
        "; ".join(reasons),
        hint=f"pass {flags} if you trust where it comes from; "
        + "; ".join(p.means for p, _ in refused),
    )


def with_own_code(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint with the need for code that only its `config.json` tells."""
    if "remote_code" in checkpoint.requires or not is_own_code(config):
        return checkpoint
    return replace(checkpoint, requires=(*checkpoint.requires, "remote_code"))


def allowed_notes(checkpoints: Sequence[Checkpoint]) -> tuple[str, ...]:
    """Return a note for everything that was allowed and is going to be done."""
    return tuple(
        f"{_some(needing)}: {permission.done}{_why(permission, needing)}"
        for permission, needing in _needing(checkpoints)
    )


def _needing(checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[_Permission, list[Checkpoint]]]:
    for permission in _PERMISSIONS:
        if needing := [c for c in checkpoints if permission.need in c.requires]:
            yield permission, needing


def _some(checkpoints: Sequence[Checkpoint]) -> str:
    first = checkpoints[0]
    where = "" if first.label == first.ref.location else f" of `{first.ref.location}`"
    more = f" (like {len(checkpoints) - 1} more)" if len(checkpoints) > 1 else ""
    return f"`{first.label}`{where}{more}"


def _why(permission: _Permission, checkpoints: Sequence[Checkpoint]) -> str:
    by_name = {family.family: family.why_required for family in families.all_families()}
    whys = (by_name.get(c.family or "", {}).get(permission.need) for c in checkpoints)
    reasons = dict.fromkeys(why for why in whys if why)
    return f" ({'; '.join(reasons)})" if reasons else ""
