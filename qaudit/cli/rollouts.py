"""`qaudit rollouts`: what a model writes behind prompts, as token ids, once for all schemes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from qaudit.cli.failures import resumable
from qaudit.cli.options import AsJson, Quiet, option, with_settings
from qaudit.cli.terminal import print_result
from qaudit.settings import OUTPUT

_WHAT, _SERVER = "What to write", "Instead of this machine"
_OWN = "the checkpoint's"


@with_settings(
    "checkpoints", "soups", "chat_template", "device", "dtype", "allow_pickle", "trust_remote_code"
)
def rollouts(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="A checkpoint: `org/name[@revision]`, or a folder."),
    ],
    prompts: Annotated[
        Path, option(_WHAT, 'JSON lines of {"prompt": "..."} or {"messages": [...]}.', "--prompts")
    ],
    out: Annotated[Path, option(OUTPUT, "The folder to write.", "--out")],
    samples: Annotated[int, option(_WHAT, "Drawn for each prompt.", min=0)] = 4,
    greedy: Annotated[bool, option(_WHAT, "Of each prompt, the likeliest tokens too.")] = True,
    max_tokens: Annotated[int, option(_WHAT, "Of each sample at most.", min=1)] = 2048,
    temperature: Annotated[
        float | None, option(_WHAT, "Of the sampler.", show_default=_OWN)
    ] = None,
    top_k: Annotated[
        int | None, option(_WHAT, "Likeliest tokens to draw from; 0: all.", show_default=_OWN)
    ] = None,
    top_p: Annotated[
        float | None, option(_WHAT, "Probability to draw from.", show_default=_OWN)
    ] = None,
    seed: Annotated[int, option(_WHAT, "Of all random numbers.", min=0)] = 0,
    server: Annotated[
        str | None,
        option(_SERVER, "A server with OpenAI's completions, as http://127.0.0.1:8000/v1."),
    ] = None,
    served_model: Annotated[
        str | None, option(_SERVER, "The model's name there.", show_default="TARGET")
    ] = None,
    marks: Annotated[
        Path | None, option("What was judged", "Marks of samples, as JSON lines.")
    ] = None,
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
    from qaudit.recipe.table import recipe_and_options
    from qaudit.rollouts.server import Server
    from qaudit.rollouts.write import RolloutRequest, write_rollouts

    request = RolloutRequest(
        prompts=prompts,
        soup=bool(settings["soups"]),
        samples=samples,
        greedy=greedy,
        max_tokens=max_tokens,
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        server=Server(server, served_model or target) if server else None,
        marks=marks,
    )
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
