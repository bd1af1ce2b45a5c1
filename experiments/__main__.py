"""`python -m experiments`: train small checkpoint series, and run experiments on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import typer.main

from qaudit.cli import main
from qaudit.cli import options as o
from qaudit.cli.app import invoke

if TYPE_CHECKING:
    from experiments.seeds import LabPrice

app = typer.Typer(
    help="Train small checkpoint series.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="A key of the file, as `model.layers=2`; repeatable."),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or mps.", show_default="auto")]
Compiled = Annotated[
    bool, typer.Option("--compile", help="Use torch.compile; needs a C++ compiler.")
]


@app.callback()
def root() -> None:
    """Train small checkpoint series: ordinary checkpoints that `qaudit scan` reads."""


@app.command()
def train(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG.yaml", help="Keys: docs/experiments.md."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the checkpoints.")] = Path(
        "qaudit-out/experiments/train"
    ),
    settings: Set = None,
    device: Device = None,
    compiled: Compiled = False,
    quiet: o.Quiet = False,
) -> None:
    """Train a small model on local text and write checkpoints that `qaudit scan` reads.

    Their learning rates are in a family file beside them. The same command again resumes.

    Example: python -m experiments train --set steps=2000 --out runs/wsd --compile
    """
    from experiments.config import prepare_text, read_config, run_of
    from experiments.train import train as train_run
    from qaudit.cli.progress import Progress
    from qaudit.cli.terminal import print_result
    from qaudit.errors import Interrupted
    from qaudit.planning.machine import choose_device

    options, document = read_config(config, settings or ())
    where = device or "auto"
    run = run_of(options, document, choose_device(where, "float32")[0].partition(":")[0])
    with Progress(quiet=quiet) as bars:
        text = prepare_text(options, run, out, bars.count)
        heldout = f"{text.heldout:,} held out" if text.heldout else "none held out: too few"
        bars.note(
            f"{run.name}: {run.shape.parameters():,} parameters, {len(text.tokens):,} tokens of "
            f"{text.documents:,} documents, {heldout}"
        )

        def show(step: int, loss: float, rate: float) -> None:
            bars.training(run.name, step, run.steps, f"{loss:.3f} {rate / 1000:.1f}k/s")
            if step in run.save_at:
                bars.note(f"{run.label(step)}: loss {loss:.3f}, {rate:,.0f} tokens per second")

        try:
            train_run(
                run,
                text,
                out,
                fork=options.fork.parent if options.fork else None,
                device=where,
                threads=options.threads,
                compiled=compiled,
                state_every=options.state_every,
                progress=show,
            )
        except KeyboardInterrupt as stop:
            raise Interrupted(
                f"run `{run.name}` was interrupted",
                hint="the same command again resumes from its last state",
            ) from stop
    print_result(str(out))


@app.command()
def run(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="Experiments (`python -m experiments list`), or a file."
        ),
    ],
    size: Annotated[
        str, typer.Option(help="smoke (minutes), cpu (half an hour a seed) or gpu.")
    ] = "smoke",
    seeds: Annotated[
        int,
        typer.Option(help="Number of seeds: each has its own first weights and data order.", min=1),
    ] = 1,
    settings: Set = None,
    device: Device = None,
    compiled: Compiled = False,
    out: Annotated[Path, typer.Option(help="Folder for runs, which are shared, and cards.")] = Path(
        "qaudit-out/experiments"
    ),
    dry_run: o.DryRun = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON.")] = False,
    quiet: o.Quiet = False,
) -> None:
    """Train a controlled experiment, scan it, and sum up what its seeds show.

    The same command again resumes; further seeds are added to those that are measured.

    Example: python -m experiments run wsd-cosine --size cpu --seeds 3 --dry-run
    """
    from experiments.seeds import LabRequest, prices, run_seed, sum_up
    from experiments.summary import render_summary, summary_to_json
    from experiments.table import SIZES, read_experiment
    from qaudit.cli.progress import Progress
    from qaudit.cli.terminal import print_result, resumable, say
    from qaudit.errors import UsageError
    from qaudit.report.folder import must_take_files

    experiments = [read_experiment(name, settings or ()) for name in names]
    if size not in SIZES:
        raise UsageError(f"there is no size `{size}`", hint=f"one of {', '.join(SIZES)}")
    request = LabRequest(size, seeds, out, device or "auto", compiled, tuple(settings or ()))
    for experiment, price in zip(experiments, prices(request, experiments), strict=True):
        text = f"{experiment.name}: {experiment.description}\n  {_priced(price)}"
        if dry_run:
            print_result(text)
        elif not quiet:
            say(text)
    if dry_run:
        return
    must_take_files(out)
    with resumable(out), Progress(quiet=quiet) as bars:

        def show(name: str, step: int, steps: int, loss: float) -> None:
            bars.training(name, step, steps, f"loss {loss:.3f}")

        for seed in range(1, seeds + 1):
            for experiment in experiments:
                run_seed(request, experiment, seed, show)
                bars.note(f"{experiment.name}, seed {seed}: wrote {request.folder(experiment)}")
    summaries = [sum_up(request, experiment) for experiment in experiments]
    for summary in summaries:
        print_result(summary_to_json(summary) if as_json else render_summary(summary))
    if any(r.standing == "not measured" for s in summaries for r in s.results):
        raise typer.Exit(3)


def _priced(price: LabPrice) -> str:
    from qaudit.report.format import count, duration, plural

    trained = f", {price.runs_trained} are trained" if price.runs_trained else ""
    return (
        f"{plural(price.runs, 'run')} to train{trained}: {count(price.tokens)} tokens at "
        f"{price.tokens_per_second:,.0f} a second (expected); "
        f"{plural(price.measurements, 'measurement')}; about {duration(price.seconds)}"
    )


@app.command()
def demo(
    out: Annotated[Path, typer.Argument(help="Folder for the series.")],
    threads: Annotated[int, typer.Option(help="Threads to train with.", min=1)] = 1,
    compiled: Compiled = False,
) -> None:
    """Regenerate the series that ships as `demo`, and its training log.

    The same command again resumes.

    Example: python -m experiments demo runs/demo --compile
    """
    from experiments.demo import regenerate
    from qaudit.cli.progress import Progress

    with Progress() as bars:

        def show(run: str, step: int, steps: int, loss: float) -> None:
            bars.training(run, step, steps, f"loss {loss:.3f}")

        regenerate(out, threads=threads, compiled=compiled, progress=show)


@app.command(name="list")
def list_() -> None:
    """List the experiments that are in this repository, one a line.

    Example: python -m experiments list
    """
    from experiments.table import shipped_experiments
    from qaudit.cli.terminal import print_result

    for name, description in shipped_experiments().items():
        print_result(f"{name:<12}  {description}")


def commands(argv: list[str]) -> int:
    return invoke(typer.main.get_group(app), "python -m experiments", argv[1:])


if __name__ == "__main__":
    main(commands)
