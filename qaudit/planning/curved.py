"""What curvature and slices through the loss ask of each subject, and what that costs. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qaudit.core.diagnostics.curvature import Curvature
from qaudit.core.diagnostics.plane import Plane
from qaudit.core.registry import parse_scheme
from qaudit.core.scheme import Scheme
from qaudit.errors import UsageError
from qaudit.planning.price import Load, Sizes
from qaudit.types import Protocol

FORWARDS = 14  # what a product costs: forward passes, blocks run again through both derivatives


def say_curvature(asked: Curvature, protocol: Protocol) -> str:
    """Say what curvature takes."""
    return (
        f"curvature: at most {products_of(asked)} products with the Hessian on "
        f"{min(asked.documents, protocol.evaluation_documents)} documents, each of about "
        f"{FORWARDS} forward passes; the model held whole in float32, and three vectors like it"
    )


def curvature_flops(asked: Curvature, protocol: Protocol, sizes: Sizes) -> float:
    """Return the arithmetic of all products."""
    per_document = protocol.document_tokens or protocol.context
    tokens = min(asked.documents, protocol.evaluation_documents) * per_document
    return 2.0 * sizes.parameters * tokens * FORWARDS * products_of(asked)


def products_of(asked: Curvature) -> int:
    """Return how many products there are at most."""
    lanczos = asked.steps if asked.eigenvalues else 0
    return 2 * asked.sketch + asked.probes + lanczos


def say_plane(asked: Plane, scheme: Scheme) -> str:
    """Say what a slice takes."""
    along = len(asked.along)
    across = f"{along} passes of them, towards the checkpoint before" if asked.grid else "one pass"
    return f"plane at {scheme.short}: {along} streams more for each subject, in float32; {across}"


def plane_load(asked: Plane, scheme: Scheme, protocol: Protocol) -> Load:
    """Return what goes through the model in a pass."""
    documents = min(asked.documents, protocol.evaluation_documents)
    load = Load.of(replace(protocol, evaluation_documents=documents), [scheme])
    return replace(load, schemes=len(asked.along) - 1)


def plane_passes(asked: Plane) -> int:
    """Return how often that is, at most."""
    return len(asked.along) if asked.grid else 1


def plane_scheme(asked: Plane, schemes: Sequence[Scheme]) -> Scheme:
    """Return the scheme whose weights a slice leads to."""
    if asked.scheme != "auto":
        return parse_scheme(asked.scheme)
    three = (scheme for scheme in schemes if getattr(scheme, "bits", None) == 3)
    found = next(three, next(iter(schemes), None))
    if found is None:
        raise UsageError(
            "a slice leads to what a scheme makes of a model, and this audit has none",
            hint="name one, as `--diagnose plane:scheme=gptq-3bit`",
        )
    return found
