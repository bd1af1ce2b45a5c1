"""Price of `curvature`: products with the Hessian, the model held whole."""

from __future__ import annotations

from collections.abc import Sequence

from qaudit.core.scheme import Scheme
from qaudit.diagnostics.curvature.parameters import Curvature
from qaudit.planning.diagnoses import DiagnosticPrice
from qaudit.planning.price import Sizes
from qaudit.types import Price, Protocol

FORWARDS = 14  # the price of a product in forward passes: blocks run again in both derivatives


def price(
    parameters: Curvature, schemes: Sequence[Scheme], protocol: Protocol, sizes: Sizes
) -> DiagnosticPrice:
    """Return the price of one subject; probing may end before it."""
    documents = min(parameters.documents, protocol.evaluation_documents)
    tokens = documents * (protocol.document_tokens or protocol.context)
    lanczos = parameters.steps if parameters.eigenvalues else 0
    products = 2 * parameters.sketch + parameters.probes + lanczos
    return DiagnosticPrice(
        f"curvature: at most {products} products with the Hessian on {documents} documents, each "
        f"of about {FORWARDS} forward passes; the model held whole in float32, and three vectors "
        "like it",
        Price(2.0 * sizes.parameters * tokens * FORWARDS * products),
    )
