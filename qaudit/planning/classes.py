"""Bit classes of a plan, where a scheme's name does not tell how many bits it stores.

A GGUF type needs columns that 256 divides, and llama.cpp stores another one where they are not.
Shapes are in the headers of a checkpoint, so that the class is known before anything is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qaudit.core.scheme import Scheme, class_of_stored
from qaudit.errors import UsageError
from qaudit.planning.sizes import Sizes
from qaudit.types import Recipe


def planned_class(scheme: Scheme, sizes: Sizes) -> str:
    return class_of_stored(scheme.bit_class, planned_bits(scheme, sizes))


def planned_bits(scheme: Scheme, sizes: Sizes) -> float | None:
    return scheme.planned_bits(sizes.matrices, sizes.blocks)


def class_notes(schemes: Sequence[Scheme], sizes: Sizes) -> Iterator[str]:
    """Say which schemes compete in another class than their names say."""
    for scheme in schemes:
        bits, name = planned_bits(scheme, sizes), planned_class(scheme, sizes)
        if bits is not None and name != scheme.bit_class:
            yield (
                f"`{scheme.short}` stores {bits:.2f} bits per weight of this model, and competes "
                f"in class {name}"
            )


def refuse_classes(recipe: Recipe, schemes: Sequence[Scheme], sizes: Sizes | None) -> None:
    """Refuse a class of bits that no scheme has; without sizes, unless shapes decide it."""
    if sizes is None and any(scheme.mixes_types for scheme in schemes):
        return
    classes = {planned_class(s, sizes) if sizes else s.bit_class for s in schemes}
    absent = [name for name in recipe.bits if name not in classes]
    if absent:
        name, measured = absent[0], ", ".join(s.short for s in schemes)
        what, example = f"class {name}", "`qaudit list schemes` has them"
        if name.isdecimal():
            what, example = f"{name} bits", f"for example `rtn-{name}bit`"
        raise UsageError(
            f"`--bits` asks for {what}, which no scheme here has: {measured}",
            hint="; ".join(
                [f"add one, {example}", *(class_notes(schemes, sizes) if sizes else ())]
            ),
        )
