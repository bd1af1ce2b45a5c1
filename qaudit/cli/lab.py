"""`qaudit lab`: train small checkpoint series."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qaudit.cli.lab_run import run
from qaudit.cli.lab_train import train

lab = typer.Typer(help="Train small checkpoint series.", no_args_is_help=True)


@lab.callback()
def root() -> None:
    """Train small checkpoint series: ordinary checkpoints that `qaudit scan` reads."""


lab.command()(train)
lab.command()(run)


@lab.command()
def demo(
    out: Annotated[Path, typer.Argument(help="Folder for the series.")],
    threads: Annotated[
        int, typer.Option(help="Threads to train with.", min=1, envvar="QAUDIT_THREADS")
    ] = 1,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile", help="Use torch.compile; needs a C++ compiler.", envvar="QAUDIT_COMPILE"
        ),
    ] = False,
) -> None:
    """Regenerate the series that ships as `demo`, and its training log.

    The same command again goes on from where it stopped.

    Example: qaudit lab demo runs/demo --compile
    """
    from qaudit.cli.speech import Bars
    from qaudit.lab.demo import regenerate

    with Bars(quiet=False) as bars:

        def show(run: str, step: int, steps: int, loss: float) -> None:
            bars.training(run, step, steps, f"loss {loss:.3f}")

        regenerate(out, threads=threads, compiled=compiled, progress=show)
