"""Hold evidence to the plan that names it: what each file is of, and which files there must be.

Files of earlier versions have no identity. They are read, and `gate --signed` refuses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from qaudit.core.registry import parse_scheme
from qaudit.saved.documents import UnitDocument
from qaudit.types import FULL_PRECISION, Measurement, Perturbation, Subject, WorkUnit


def must_be_of(measured: Measurement, subject: Subject, spec: str) -> None:
    """Raise ValueError for a measurement of another subject, configuration or scheme."""
    identity = measured.identity
    if measured.spec != spec or (identity is not None and identity.get("scheme") != spec):
        raise ValueError(f"it is of `{measured.spec}` and not of `{spec}`")
    if identity is None:
        return
    if identity.get("subject") != subject.content:
        raise ValueError(f"it is of other weights than those of `{subject.label}`")
    planned = subject.first.configuration_sha256
    runs_code = any(file.name.endswith(".py") for file in subject.first.settings)
    hashed = planned is not None and not planned.startswith("git:") and not runs_code
    if hashed and identity.get("model") != planned:
        raise ValueError(f"it is of another configuration than that of `{subject.label}`")


def must_be_pass(
    measured: Measurement, perturbed: Perturbation | None, protocol: Mapping[str, Any]
) -> None:
    """Raise ValueError for a measurement that was computed otherwise, or on other text."""
    identity = measured.identity
    if identity is None:
        return
    if (",perturbed=" in str(identity.get("geometry"))) != (perturbed == "rounding"):
        raise ValueError("it is perturbed, or is not, where the plan has it otherwise")
    if perturbed not in (None, "rounding") and identity.get("dtype") != f"torch.{perturbed}":
        raise ValueError(f"it was not computed in {perturbed}")
    is_first = measured.calibration_seed == protocol.get("calibration_seed")
    texts = [protocol.get(name) for name in ("corpus_sha256", "documents_sha256")]
    if is_first and identity.get("corpus") not in texts:  # without rollouts where none are scored
        raise ValueError("it is of other text than the protocol names")


def must_be_complete(unit: WorkUnit, document: UnitDocument, seeds: Sequence[int]) -> None:
    """Raise ValueError where a record has neither results nor a reason of a scheme of its unit.

    `seeds` are those of the calibration text of its results, in their order.
    """
    if document.error:
        return
    if (document.difference is not None) != unit.subject.is_release:
        raise ValueError("only a release is compared, and a release is nothing else")
    if unit.subject.is_release:
        return
    if document.search is not None and len(document.search.members) < 2:
        return  # one checkpoint is best, and it has results of its own
    first = int(document.protocol.get("calibration_seed", 0))
    rows = zip(document.results, seeds, strict=True)
    results = Counter((result.spec, result.perturbed, seed - first) for result, seed in rows)
    for step in unit.passes:
        for spec in (*([FULL_PRECISION] if step.full_precision else []), *step.schemes):
            short = spec if spec == FULL_PRECISION else parse_scheme(spec).short
            if (
                not results[spec, step.perturbed, step.draw]
                and short not in document.failed_schemes
            ):
                raise ValueError(f"it has no result of {short}, and no reason")
