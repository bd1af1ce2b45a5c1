"""`qaudit rollouts`: what a model writes behind prompts, as token ids, once for all schemes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from qaudit.cli.failures import resumable
from qaudit.cli.options import AsJson, Quiet, option, with_settings
from qaudit.cli.terminal import print_result
from qaudit.settings import OUTPUT, SAMPLE, Sampling, settings_of


@with_settings(
    "samples",
    "max_tokens",
    "temperature",
    "server",
    more=("device", "checkpoints", "soups", "allow_pickle", "trust_remote_code"),
    keys=(*settings_of(Sampling), "chat_template", "dtype"),
)
def rollouts(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="A checkpoint: `org/name[@revision]`, or a folder."),
    ],
    prompts: Annotated[
        Path,
        option(SAMPLE, 'JSON lines of {"prompt": "..."} or {"messages": [...]}.', "--prompts"),
    ],
    out: Annotated[Path, option(OUTPUT, "The folder to write.", "--out")],
    *,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Write rollouts: token ids, the sampler's settings, and the hash of the weights.

    Run the same command again to resume after an interruption. A server's text has to tokenize
    back to what it generated; its key goes into QAUDIT_SERVER_KEY.

    Example: qaudit rollouts org/name --prompts prompts.jsonl --out rollouts
    """
    from qaudit.cli.progress import Progress
    from qaudit.recipe.table import recipe_and_options, take
    from qaudit.report.folder import must_be_outside
    from qaudit.rollouts.server import Server
    from qaudit.rollouts.write import RolloutRequest, write_rollouts

    must_be_outside(out)
    sampling, soup = take(Sampling, settings), bool(settings["soups"])
    address, model = sampling.server, sampling.served_model or target
    request = RolloutRequest(prompts, soup, sampling, Server(address, model) if address else None)
    # Rollouts read no text but prompts, and resolving a target looks for one.
    texts = {"calibration": str(prompts), "evaluation": str(prompts)}
    recipe, options = recipe_and_options(target, **texts, **settings)
    with resumable(out), Progress(quiet=quiet) as progress:
        written = write_rollouts(recipe, out, options, request, progress)
    tokens = sum(len(sample.new_ids) for sample in written.samples)
    finished = sum(sample.finished for sample in written.samples)
    about = {"samples": len(written.samples), "finished": finished, "tokens": tokens}
    line = f"{len(written.samples)} samples of {tokens:,} tokens in {out}, {finished} finished"
    print_result(json.dumps({"out": str(out), **about}, indent=1) if as_json else line)
    return 0
