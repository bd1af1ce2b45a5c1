"""A race: lines while it runs, text for a terminal at its end, and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qaudit.report.format import duration, listing, plural, printable, spread
from qaudit.report.terminal import filled
from qaudit.saved.codec import encode, text_of
from qaudit.types import Departure, Race, RaceCost, Round

UNIT = "nats per token"


def render_round(round_: Round) -> str:
    """Return the leader after a round, and the subjects that left with their distance."""
    head = f"{plural(round_.documents, 'document')}, {len(round_.entrants)} in the race"
    lines = [f"{head}: {round_.leader} leads" if round_.leader else f"{head}: no subject is left"]
    lines += [f"  {departure.subject} {_why(departure)}" for departure in round_.left]
    return "\n".join(map(printable, lines))


def _why(departure: Departure) -> str:
    if departure.behind is None:
        return "leaves: it could not be measured"
    behind = f"{spread(departure.behind)} behind"
    if departure.shown:
        return f"leaves, {behind}"
    return f"leaves by the schedule, {behind}: not shown to be worse"


def render_race(race: Race, scheme: str, cost: RaceCost, failed: dict[str, str]) -> str:
    parts = [" ".join(_result(race, scheme)), *_unsettled(race), _receipt(race, cost)]
    parts += [f"Skipped {label}: {reason}" for label, reason in failed.items()]
    return "\n\n".join(filled(part) for part in parts) + "\n"


def _result(race: Race, scheme: str) -> Iterator[str]:
    entrants = plural(len(race.rounds[0].entrants), "subject")
    chosen = race.rounds[-1].documents
    yield f"`{race.winner}` at {scheme} wins the race of {entrants}, chosen on {chosen} documents."
    if race.interval is None:
        yield "There are no other documents to confirm it on."
        return
    lead = spread(race.interval)
    yield f"Its loss minus that of the runner-up `{race.runner_up}` is {lead} {UNIT}"
    if race.confirmed_on is not None:
        yield f"on {race.confirmed_on} documents that it was not chosen on: confirmed."
    elif race.interval.high >= 0:
        yield "on documents that it was not chosen on: no detectable difference."
    else:
        yield "on other documents, which are too few to confirm it."
    labels = [f"`{label}`" for label in race.contenders if label != race.runner_up]
    if labels:
        yield f"{listing(labels)} may be as good."


def _unsettled(race: Race) -> Iterator[str]:
    names = [
        f"`{departure.subject}`"
        for round_ in race.rounds
        for departure in round_.left
        if departure.behind is not None and not departure.shown
    ]
    if names:
        yield (
            f"{listing(names)} left by the schedule, not shown to be worse: "
            "a higher `--share` keeps them in longer."
        )


def _receipt(race: Race, cost: RaceCost) -> str:
    text = f"Evaluated {_of(race.tokens, race.exhaustive_tokens)}"
    if cost.exhaustive_calibration_tokens:
        text += (
            f"; calibrated on {_of(cost.calibration_tokens, cost.exhaustive_calibration_tokens)}"
        )
    passes = f"{plural(cost.passes, 'measurement')}, {cost.quantized} of them quantized"
    return f"{text} of an exhaustive run. {passes}: {duration(cost.seconds)} of computing."


def _of(spent: int, whole: int) -> str:
    return f"{spent:,} of the {whole:,} tokens ({100 * spent / max(1, whole):.0f} %)"


def race_to_json(
    race: Race, scheme: str, rules: dict[str, float], cost: RaceCost, failed: dict[str, str]
) -> str:
    document: dict[str, Any] = {
        "scheme": scheme,
        "unit": UNIT,
        **rules,
        **encode(race),
        "receipt": encode(cost),
        "skipped": [{"subject": label, "reason": reason} for label, reason in failed.items()],
    }
    return text_of(document)
