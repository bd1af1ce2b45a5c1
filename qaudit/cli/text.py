"""`qaudit rollouts` and `import`: what a model writes, here or in the runs of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from qaudit.cli.options import AsJson, Quiet, option, with_settings
from qaudit.cli.terminal import print_result, resumable, say
from qaudit.errors import UsageError
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
    from qaudit.rollouts.write import write_rollouts

    must_be_outside(out)
    sampling, soup = take(Sampling, settings), bool(settings["soups"])
    # Rollouts read no text but prompts, and resolving a target looks for one.
    texts = {"calibration": str(prompts), "evaluation": str(prompts)}
    recipe, options = recipe_and_options(target, **texts, **settings)
    with resumable(out), Progress(quiet=quiet) as progress:
        written = write_rollouts(recipe, out, options, prompts, sampling, progress, soup=soup)
    tokens = sum(len(sample.new_ids) for sample in written.samples)
    finished = sum(sample.finished for sample in written.samples)
    about = {"samples": len(written.samples), "finished": finished, "tokens": tokens}
    line = f"{len(written.samples)} samples of {tokens:,} tokens in {out}, {finished} finished"
    print_result(json.dumps({"out": str(out), **about}, indent=1) if as_json else line)
    return 0


_ANSWERS, _RUN = "The answers", "a file or the folder of a run. Repeatable."
Answerer = option(_ANSWERS, "The checkpoint or soup that gave them.", show_default="the only one")
Marks = option(
    _ANSWERS,
    "Whose marks count, as `exact_match,strict-match` or a scorer.",
    show_default="acc, or the only one",
)


@with_settings(keys=("sign",))
def import_(
    audit: Annotated[
        Path, typer.Argument(metavar="AUDIT", help="The output folder of a finished scan.")
    ],
    base: Annotated[list[Path], option(_ANSWERS, f"Of full precision: {_RUN}")],
    quantized: Annotated[
        list[str], option(_ANSWERS, f"Of a scheme of the audit: {_RUN}", metavar="SCHEME=PATH")
    ],
    subject: Annotated[str | None, Answerer] = None,
    metric: Annotated[str | None, Marks] = None,
    *,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Add tasks that lm-eval or inspect ran to an audit: paired, with intervals, for its gate.

    Reads `samples_*.jsonl` of lm-eval, and logs of inspect (`.json`, `.eval`).
    Items are paired by a hash of the item and its prompt. Nothing is generated or measured.

    Example: qaudit import out --base lm-eval/bf16 --quantized gptq-4bit=lm-eval/w4
    """
    from qaudit.audit import import_answers
    from qaudit.report.format import or_dash, percent
    from qaudit.saved.codec import encode

    files: dict[str, list[str | Path]] = {}
    for text in quantized:
        # A scheme may have parameters, as `gptq-3bit:group=64`: the path is one that is there.
        splits = [(text[:k], text[k + 1 :]) for k, letter in enumerate(text) if letter == "="]
        readable = (split for split in splits if Path(split[1]).exists())
        scheme, place = next(readable, splits[-1] if splits else ("", ""))
        if not (scheme and place):
            raise UsageError(
                f"`--quantized {text}` is not SCHEME=PATH",
                hint="write it as `--quantized SCHEME=FILE`, with a scheme of the audit",
            )
        files.setdefault(scheme, []).append(Path(place))
    sign = bool(settings["sign"])
    judged = import_answers(audit, base, files, subject=subject, metric=metric, sign=sign)
    rows = [row for row in judged.record.tasks if row.imported]
    lines = []
    for row in rows:
        line = f"{row.subject} {row.scheme} {row.task}: {percent(row.accuracy)} % of {row.items}"
        if row.drop is not None:
            line += (
                f"; {percent(row.drop)} points lost, {row.right_to_wrong} right to wrong, "
                f"{row.wrong_to_right} back, p {or_dash(row.p_value, '{:.2g}'.format)}"
            )
        lines.append(line)
    text = json.dumps([*map(encode, rows)], indent=1) if as_json else "\n".join(lines)
    print_result(text)
    if not quiet:
        say(f"wrote {audit / 'card.md'}, report.html, audit.json, evidence/ and plots/")
    return 0
