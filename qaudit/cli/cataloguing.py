"""What `qaudit series` does once its options are parsed: names, a choice, trees, a table.

Names are one call for a repository. Trees are read for what is selected, because a scan would
read them too and keeps them for ever; of more than a stranger's share of calls only with
`--check`, which walks every tree as fast as the Hub allows. What was read stays read: an
interrupted walk goes on where it stopped.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qaudit.checkpoints.folder import family_beside, weights_nbytes, with_hashes
from qaudit.checkpoints.placed import tell_apart
from qaudit.cli.speech import Bars, note, print_result
from qaudit.cli.suggesting import suggested
from qaudit.errors import HubError, Interrupted, QauditError, UnreachableError
from qaudit.families import Family, load
from qaudit.hub import open_hub
from qaudit.hub.series import find_all, with_files
from qaudit.judge.content import content_findings
from qaudit.recipe import is_telling, recipe_of, select
from qaudit.report.catalog import Catalog, catalog_to_json, render_catalog
from qaudit.report.format import duration
from qaudit.types import Checkpoint, Recipe

if TYPE_CHECKING:
    from qaudit.hub.listing import Listing

MOST_TREES = 32
"""So many trees are read without being asked for: far from a stranger's 500 calls."""

NARROWEST, WIDEST = 80, 120
LINES_APART = 50  # trees between two lines about progress, where no bar can be drawn


@dataclass(frozen=True)
class Request:
    """The options of one `series`: what was asked of the recipe, and how to show it."""

    asked: dict[str, Any]
    check: bool
    everything: bool
    as_json: bool
    quiet: bool
    after: str | None = None  # an audit of the series, to say what to measure next


def carry_out(request: Request) -> int:
    """Find, choose, read and print; return the exit code."""
    recipe = recipe_of(**request.asked)
    with Bars(quiet=request.quiet) as bars:
        walk = _Walk(recipe, request, bars)
        catalog = walk.catalog()
    if request.after is not None:
        print_result(suggested(request.after, catalog, as_json=request.as_json))
    elif request.as_json:
        print_result(catalog_to_json(catalog))
    else:
        print_result(render_catalog(catalog, width=_width(), everything=request.everything))
    for reason, times in walk.failures.items():
        note(f"{times} of the trees could not be read: {reason}")
    return 3 if request.check and walk.failures else 0


def _width() -> int | None:
    """Return the width of the terminal, or none where the table goes into a file."""
    if not sys.stdout.isatty():
        return None
    return min(WIDEST, max(NARROWEST, shutil.get_terminal_size().columns))


class _Walk:
    """Reads a series as far as was asked, and remembers what could not be read."""

    def __init__(self, recipe: Recipe, request: Request, bars: Bars) -> None:
        self.recipe, self.request, self.bars = recipe, request, bars
        self.failures: dict[str, int] = {}
        self.refused: set[tuple[str, str]] = set()

    @cached_property
    def listing(self) -> Listing:
        """Open the Hub, once and only if a target is there."""
        return open_hub(watch=self.bars).listing

    def catalog(self) -> Catalog:
        """Return the series with what was read of it."""
        found = find_all(self.recipe.targets, self.recipe, lambda: self.listing)
        chosen = {c.label for c in select(self.recipe, found)}
        parts = list(self._read(found, chosen))
        apart = tell_apart(part for part, _ in parts)
        return Catalog(
            targets=self.recipe.targets,
            checkpoints=apart,
            selected=frozenset(c.label for c, (_, on) in zip(apart, parts, strict=True) if on),
            by_default=is_telling(self.recipe, found),
            nbytes={c.label: weights_nbytes(c) for c in apart if c.commit is None and not c.files},
            findings=content_findings(apart),
            remarks=tuple(remark for family in _families(found) for remark in family.remarks),
        )

    def _read(
        self, found: Sequence[Checkpoint], chosen: set[str]
    ) -> Iterator[tuple[Checkpoint, bool]]:
        """Read trees of what is wanted, and take what is known of the rest."""
        wanted = {c.label for c in found} if self.request.check else chosen
        if len(wanted) > MOST_TREES and not self.request.check:
            wanted = set()
        self._fetch_trees([c for c in found if c.label in wanted and c.commit])
        for checkpoint in found:
            if checkpoint.commit is None:
                parts = with_hashes([checkpoint]) if self.request.check else (checkpoint,)
            else:
                place = (checkpoint.ref.location, str(checkpoint.commit))
                asked = checkpoint.label in wanted and place not in self.refused
                parts = with_files(self.listing, [checkpoint], known_only=not asked, keep_all=True)
            for part in parts:
                yield part, checkpoint.label in chosen

    def _fetch_trees(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Ask for every tree that is not known yet; what one refuses, the others may give."""
        places = dict.fromkeys((c.ref.location, str(c.commit)) for c in checkpoints)
        missing = [p for p in places if self.listing.known_files(*p) is None]
        done = 0
        try:
            for done, left_seconds in enumerate(_paced(missing, self._fetch_tree), start=1):
                self._tell(done, len(missing), left_seconds)
        except (KeyboardInterrupt, UnreachableError) as error:
            command = shlex.join(["qaudit", *sys.argv[1:]])
            said = f"{done} of {len(missing)} trees were read and are kept"
            raise _stopped(error, said, f"go on with: {command}") from error

    def _fetch_tree(self, place: tuple[str, str]) -> None:
        try:
            self.listing.files(*place)
        except HubError as error:
            self.refused.add(place)
            self.failures[error.message] = self.failures.get(error.message, 0) + 1

    def _tell(self, done: int, total: int, left_seconds: float) -> None:
        self.bars.counted("file trees", done, total)
        drawn = self.request.quiet or sys.stderr.isatty()
        if done % LINES_APART == 0 and done < total and not drawn:
            note(f"read {done} of {total} trees, about {duration(left_seconds)} left")


def _families(found: Sequence[Checkpoint]) -> Iterator[Family]:
    """Yield the families of a series, of a file beside it or of those that ship."""
    first = {c.family: c for c in reversed(found) if c.family}
    for name, checkpoint in first.items():
        beside = family_beside(checkpoint) if checkpoint.commit is None else None
        yield beside if beside is not None and beside.family == name else load(name)


def _paced(
    places: Sequence[tuple[str, str]],
    fetch: Callable[[tuple[str, str]], None],
) -> Iterator[float]:
    """Fetch in turn; yield the seconds that are left at the pace so far, waits included."""
    begin = time.monotonic()
    for done, place in enumerate(places, start=1):
        fetch(place)
        yield (time.monotonic() - begin) / done * (len(places) - done)


def _stopped(error: BaseException, said: str, hint: str) -> QauditError:
    if isinstance(error, UnreachableError):
        return UnreachableError(f"{error.message}; {said}", hint=hint)
    return Interrupted(f"interrupted; {said}", hint=hint)
