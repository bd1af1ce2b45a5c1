"""The finding about an audit whose parts ran on devices of several kinds.

    QA044  subjects were measured on devices of several kinds

Kinds of devices round otherwise. One subject is measured on each of them, and what they differ by
is compared with what rounding alone moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qaudit.judge.pooling import Moved
from qaudit.types import Finding

Place = tuple[str, str, str]
"""A subject, a scheme, and another kind of device than the one that measured them."""


def device_findings(
    kinds: Sequence[str],
    moved: Mapping[Place, Moved],
    floor: Mapping[tuple[str, str], Moved],
    subjects: Sequence[str],
) -> tuple[Finding, ...]:
    """Return the finding, if there are several kinds; `floor` is what rounding moves a cell by."""
    if len(kinds) < 2:
        return ()
    several = f"the subjects were measured on {len(kinds)} kinds of devices ({', '.join(kinds)})"
    unmeasured = [kind for kind in kinds if kind not in {place[2] for place in moved}]
    if not moved or len(unmeasured) > 1:  # one of them measured the subject in the first place
        message = f"{several}, and by how much these differ is not measured"
        hint = "run the parts of the last round on each kind, or measure everything on one"
        cell = subjects[-1], None
        return (Finding("QA044", "warn", *cell, message, hint, outcome="inconclusive"),)
    (subject, scheme, kind), most = max(moved.items(), key=lambda item: item[1].nats)
    rounding = floor[subject, scheme].nats if (subject, scheme) in floor else 0.0
    kl = "" if most.kl is None else f" and its KL divergence by {most.kl:.2g}"
    message = (
        f"{several}: on {kind} the loss of `{subject}` at {scheme} differs by "
        f"{most.nats:.2g} nats per token{kl}, where rounding alone moves it by {rounding:.2g}"
    )
    if most.nats <= rounding:
        return (Finding("QA044", "info", subject, scheme, message, "", outcome="pass"),)
    hint = "measure on devices of one kind what is close"
    return (Finding("QA044", "warn", subject, scheme, message, hint, outcome="pass"),)
