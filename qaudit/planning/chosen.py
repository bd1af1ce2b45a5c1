"""What a recipe chooses: subjects and schemes, all of them permitted, before anything is priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qaudit.core.registry import parse_schemes
from qaudit.core.scheme import Calibration, Scheme
from qaudit.errors import UsageError
from qaudit.hub import Hub, open_hub
from qaudit.planning.passes import refuse_classes, with_scheme
from qaudit.planning.permissions import refuse
from qaudit.planning.resolve import resolve
from qaudit.planning.shipped import all_shipped
from qaudit.planning.survey import Survey, survey
from qaudit.planning.unread import without_unread
from qaudit.policy import policy_named
from qaudit.settings import RunOptions
from qaudit.support.keys import nearest
from qaudit.types import Checkpoint, Recipe, Resolved, Subject, reference_in


@dataclass(frozen=True, eq=False)
class Chosen:
    """What a recipe chooses, all of it permitted, and how large its models are."""

    resolved: Resolved
    schemes: tuple[Scheme, ...]
    subjects: tuple[Subject, ...]
    members: list[Checkpoint]
    hub: Hub | None
    seen: Survey


def choose(
    recipe: Recipe, options: RunOptions, hub: Hub | None, resolved: Resolved | None
) -> Chosen:
    schemes = parse_schemes(recipe.schemes)
    refuse_classes(recipe, schemes, None)
    _refuse_replays(recipe, schemes)
    for scheme in schemes:
        scheme.must_be_installed()
    policy_named(recipe.policy)  # a wrong policy is refused before anything is fetched
    resolved = resolved or resolve(recipe, hub)
    members = list(dict.fromkeys(c for s in resolved.subjects for c, _ in s.members))
    if hub is None and (resolved.texts or any(c.commit for c in (*members, *resolved.shipped))):
        hub = open_hub()
    allow_pickle, trust_remote_code = options.allow_pickle, options.trust_remote_code
    refuse(members, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    _must_name_reference(recipe, resolved.subjects)
    resolved, unread_notes = without_unread(resolved, hub)
    members = list(dict.fromkeys(c for s in resolved.subjects for c, _ in s.members))
    files, shipped = all_shipped(resolved.subjects, resolved.shipped, hub, schemes)
    schemes, resolved = (*schemes, *shipped), replace(resolved, shipped=files)
    subjects = tuple(with_scheme(s, schemes) if s.is_search else s for s in resolved.subjects)
    seen = survey(subjects, hub, allow_pickle=allow_pickle, code=trust_remote_code)
    refuse_classes(recipe, schemes, seen.largest)
    seen = replace(seen, notes=(*unread_notes, *seen.notes))
    return Chosen(resolved, schemes, subjects, members, hub, seen)


def _refuse_replays(recipe: Recipe, schemes: Sequence[Scheme]) -> None:
    """Refuse to replay a choice of experts in mini-batches that are cut anew."""
    learned = [s.short for s in schemes if s.calibration is Calibration.WHOLE_BLOCK]
    if recipe.routing == "reference" and learned:
        raise UsageError(
            f"`--routing reference` replays the choice of experts in whole batches, and "
            f"`{learned[0]}` learns on other ones",
            hint=f"leave `{learned[0]}` out, or `--routing reference`",
        )


def _must_name_reference(recipe: Recipe, subjects: Sequence[Subject]) -> None:
    if recipe.reference is None:
        return
    reference = reference_in(subjects, recipe.reference)
    if reference is None or reference.is_search:
        labels = [subject.label for subject in subjects]
        raise UsageError(
            f"the reference `{recipe.reference}` is not one of the {len(subjects)} subjects that "
            "are measured",
            hint=f"name it as a target, too; {nearest(recipe.reference, labels)}",
        )
