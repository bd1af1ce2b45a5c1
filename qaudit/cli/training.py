"""What `qaudit lab train` does once its options are parsed: the run, its text, its progress."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qaudit.cli.speech import Bars, print_result
from qaudit.errors import Interrupted, UsageError
from qaudit.lab.asked import Asked, fork_folder, run_asked

if TYPE_CHECKING:
    from qaudit.lab.text import TokenStream

_SIZES = ("hidden", "ffn", "layers", "heads", "kv_heads", "tied", "vocabulary", "context")
_RATES = (
    "peak", "warmup", "floor_ratio", "period", "multiplier", "peak_decay", "amplitude",
    "cool_share",
)  # fmt: skip
_FIELDS = (
    "batch", "accumulation", "seed", "order", "weight_decay", "clip", "sam_rho", "ema_decay",
    "precision",
)  # fmt: skip


def carry_out(given: Mapping[str, Any]) -> int:
    """Train the run that is asked for, or go on with it, and print where it lies."""
    from qaudit.lab.devices import choose_device, use_threads
    from qaudit.lab.train import train

    out: Path = given["out"]
    if given["threads"] is not None:
        use_threads(given["threads"])
    device = choose_device(given["device"])
    run = run_asked(_asked(given), device.type)
    with Bars(quiet=given["quiet"]) as bars:
        text = _text(given, run.shape.vocabulary, bars)
        bars.said(f"{run.name}: {run.shape.parameters():,} parameters, {_described(text)}")

        def tell(step: int, loss: float, rate: float) -> None:
            bars.training(run.name, step, run.steps, f"{loss:.3f} {rate / 1000:.1f}k/s")
            if step in run.save_at:
                bars.said(f"{run.label(step)}: loss {loss:.3f}, {rate:,.0f} tokens per second")

        try:
            train(
                run, text, out,
                fork=fork_folder(given["fork"]) if given["fork"] else None,
                device=given["device"], compiled=given["compiled"],
                state_every=given["state_every"], progress=tell,
            )  # fmt: skip
        except KeyboardInterrupt as stop:
            raise Interrupted(
                f"run `{run.name}` was interrupted",
                hint="the same command again goes on from its last state",
            ) from stop
    print_result(str(out))
    return 0


def _asked(given: Mapping[str, Any]) -> Asked:
    """Return the options as a run understands them."""
    training = {name: given[name] for name in _FIELDS}
    training["betas"] = _numbers("betas", given["betas"], 2)
    training["keep_at"] = _steps("keep-states", given["keep_states"]) or None
    if given["lawa"] is not None:
        training["lawa"] = tuple(map(int, _numbers("lawa", given["lawa"], 2, by=":") or ()))
    sizes = {name: given[name] for name in _SIZES}
    if given["tokenizer"] is not None and sizes["vocabulary"] is None:
        from qaudit.lab.text import entries_of

        sizes["vocabulary"] = entries_of(given["tokenizer"])
    return Asked(
        name=given["name"],
        shape=given["shape"],
        sizes=sizes,
        schedule=given["schedule"],
        rates={**{name: given[name] for name in _RATES}, "shape": given["decay_shape"]},
        decay_share=given["decay_share"],
        steps=given["steps"],
        save_every=given["save_every"],
        save_at=_steps("save-at", given["save_at"]),
        attention=given["attention"],
        training=training,
        fork=given["fork"],
    )


def _steps(option: str, text: str | None) -> tuple[int, ...]:
    return tuple(map(int, _numbers(option, text) or ()))


def _numbers(
    option: str, text: str | None, count: int | None = None, by: str = ","
) -> tuple[float, ...] | None:
    """Read numbers; one that is none is named."""
    if text is None:
        return None
    parts = text.split(by)
    try:
        numbers = tuple(float(part) if count and by == "," else int(part) for part in parts)
    except ValueError as error:
        raise UsageError(
            f"`--{option}` is `{text}`", hint=f"write numbers with `{by}` between them"
        ) from error
    if count is not None and len(numbers) != count:
        raise UsageError(f"`--{option}` is `{text}`", hint=f"write {count} numbers, as `a{by}b`")
    return numbers


def _text(given: Mapping[str, Any], vocabulary: int, bars: Bars) -> TokenStream:
    """Return the text of the folder; a fork into another folder reads with its parent's tokens."""
    from qaudit.lab.text import prepare

    tokenizer: Path | None = given["tokenizer"]
    if tokenizer is None and given["fork"] is not None:
        beside = fork_folder(given["fork"])
        if beside.resolve() != given["out"].resolve():
            tokenizer = beside / "text" / "tokenizer"
    return prepare(
        given["out"] / "text",
        sources=given["texts"] or (),
        vocabulary=vocabulary,
        tokenizer=tokenizer,
        progress=bars.counted,
    )


def _described(text: TokenStream) -> str:
    heldout = f"{text.heldout:,} held out" if text.heldout else "none held out: they are too few"
    return f"{len(text.tokens):,} tokens of {text.documents:,} documents, {heldout}"
