"""Recipe -> Catalog: the checkpoints of a series, and what is known of each before a scan.

Names cost one request for a repository. File trees are read for the selected checkpoints,
because a scan reads them too and keeps them; for more than `MOST_TREES` only with `check`,
which reads all of them. Every tree that was read is kept, so an interrupted walk resumes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property

from qaudit.checkpoints.folder import family_of, weights_nbytes, with_hashes
from qaudit.checkpoints.series import tell_apart
from qaudit.checkpoints.stamps import folder_of
from qaudit.errors import HubError, Interrupted, ModelError, QauditError, UnreachableError
from qaudit.hub import Hub, open_hub
from qaudit.hub.series import find_all, with_files
from qaudit.judge.content import content_findings
from qaudit.planning.survey import must_be_auditable
from qaudit.recipe.selection import is_default_choice, select
from qaudit.report.catalog import Catalog
from qaudit.types import Checkpoint, Recipe, Watch
from qaudit.whole import read_regular

MOST_TREES = 32
"""File trees to read without `check`: far from the 500 requests that strangers have."""

_RESUME = "run the same command again"


def read_catalog(
    recipe: Recipe, watch: Watch, *, check: bool = False
) -> tuple[Catalog, dict[str, int]]:
    """Return the catalog of a series, and how many trees failed for which reason."""
    reader = _CatalogReader(recipe, watch, check)
    return reader.catalog(), reader.failures


class _CatalogReader:
    def __init__(self, recipe: Recipe, watch: Watch, check: bool) -> None:
        self._recipe, self._watch, self._check = recipe, watch, check
        self._refused: set[tuple[str, str]] = set()
        self.failures: dict[str, int] = {}

    @cached_property
    def _hub(self) -> Hub:
        return open_hub(watch=self._watch)

    def catalog(self) -> Catalog:
        recipe = self._recipe
        names = find_all(recipe.targets, recipe, lambda: self._hub.listing)
        selected = {checkpoint.label for checkpoint in select(recipe, names)}
        parts = list(self._with_files(names, selected))
        checkpoints = tell_apart(part for part, _ in parts)
        return Catalog(
            targets=recipe.targets,
            checkpoints=checkpoints,
            selected=frozenset(
                c.label for c, (_, name) in zip(checkpoints, parts, strict=True) if name in selected
            ),
            by_default=is_default_choice(recipe, names),
            nbytes={
                c.label: weights_nbytes(c) for c in checkpoints if c.commit is None and not c.files
            },
            findings=content_findings(checkpoints),
            refusals=tuple(self._refusals([c for c in checkpoints if c.commit is None or c.files])),
            remarks=tuple(
                remark
                for name, checkpoint in {c.family: c for c in reversed(names) if c.family}.items()
                for remark in family_of(checkpoint, name).remarks
            ),
        )

    def _with_files(
        self, names: Sequence[Checkpoint], selected: set[str]
    ) -> Iterator[tuple[Checkpoint, str]]:
        wanted = {c.label for c in names} if self._check else selected
        if len(wanted) > MOST_TREES and not self._check:
            wanted = set()
        self._fetch_trees([c for c in names if c.label in wanted and c.commit])
        for checkpoint in names:
            if checkpoint.commit is None:
                parts = with_hashes([checkpoint]) if self._check else (checkpoint,)
            else:
                unread = checkpoint.label not in wanted or _place(checkpoint) in self._refused
                parts = with_files(
                    self._hub.listing, [checkpoint], known_only=unread, keep_all=True
                )
            for part in parts:
                yield part, checkpoint.label

    def _refusals(self, checkpoints: Sequence[Checkpoint]) -> Iterator[str]:
        """Yield why the last checkpoint of each repository cannot be audited, by its headers.

        Of folders beside each other it is the last with the same configuration. Those of the Hub
        are asked for with `--check` alone: they are further requests.
        """
        last = {_model(checkpoint): checkpoint for checkpoint in checkpoints}
        for checkpoint in last.values():
            if checkpoint.commit is not None and not self._check:
                continue
            try:
                must_be_auditable(checkpoint, None if checkpoint.commit is None else self._hub)
            except ModelError as error:
                yield f"`{checkpoint.label}` cannot be audited: {error.message}"
            except QauditError:  # damaged, or not reached: another matter
                continue

    def _fetch_trees(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Read every tree that is not known yet; one that fails leaves the others."""
        places = dict.fromkeys(map(_place, checkpoints))
        missing = [p for p in places if self._hub.listing.known_files(*p) is None]
        begin, count = time.monotonic(), 0
        try:
            for place in missing:
                try:
                    self._hub.listing.files(*place)
                except HubError as error:
                    self._refused.add(place)
                    self.failures[error.message] = self.failures.get(error.message, 0) + 1
                count += 1
                left_seconds = (time.monotonic() - begin) / count * (len(missing) - count)
                self._watch.count("file trees", count, len(missing), left_seconds)
        except KeyboardInterrupt as error:
            read = _so_far(count, len(missing))
            raise Interrupted(f"interrupted; {read}", hint=_RESUME) from error
        except UnreachableError as error:
            read = _so_far(count, len(missing))
            raise UnreachableError(f"{error.message}; {read}", hint=_RESUME) from error


def _model(checkpoint: Checkpoint) -> tuple[str, bytes]:
    """Return what checkpoints of one model share: the repository, or folder and configuration."""
    if checkpoint.commit is not None:
        return checkpoint.ref.location, b""
    folder, configuration = folder_of(checkpoint), b""
    with suppress(OSError):  # which its headers are refused for
        configuration = read_regular(folder / "config.json")
    return str(folder.parent), configuration


def _place(checkpoint: Checkpoint) -> tuple[str, str]:
    return checkpoint.ref.location, str(checkpoint.commit)


def _so_far(done: int, total: int) -> str:
    return f"{done} of {total} trees were read and are kept"
