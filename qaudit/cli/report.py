"""`qaudit report`, `diff` and `series`, `publish` and `gallery`: what was saved, shown. No torch.

Before an audit is published it is read and its evidence hashed, so that a damaged one never costs
a request. A README comes from the Hub: it is printed without what moves a cursor.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
import shutil
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qaudit.cli.options import AsJson, AuditPlace, Quiet, Targets, audit_at, option, with_settings
from qaudit.cli.terminal import complain, print_result, say
from qaudit.errors import UnfinishedError, UsageError
from qaudit.settings import MEASURE, OUTPUT

if TYPE_CHECKING:
    from qaudit.hub import Hub
    from qaudit.hub.publish import PublishPlan
    from qaudit.report.plan import Catalog


_DEFAULT = {"show_default": "terminal, and md into a pipe"}
Form = option(OUTPUT, "md, html, terminal or json.", "--format", **_DEFAULT)
Into = option(OUTPUT, "Put the card between its markers in this README; print nothing.")
Plots = option(OUTPUT, "Draw the pictures again, into this folder.")
_LINES = "Lines of text in the card, not pictures: for comments and step summaries."
Sparklines = option(OUTPUT, _LINES, "--sparklines")


def report(
    audit: AuditPlace,
    form: Annotated[str | None, Form] = None,
    into: Annotated[Path | None, Into] = None,
    plots: Annotated[Path | None, Plots] = None,
    sparklines: Annotated[bool, Sparklines] = False,
) -> int:
    """Print a saved audit as a card, a page, a summary or JSON.

    Of a scan that is not finished it prints what is measured so far, and exits with 3.

    Example: qaudit report qaudit-out/demo
    """
    from qaudit.report.folder import PICTURES, render, render_card, write, write_block
    from qaudit.saved.audits import read_audit

    if form is None:
        about_card = into is not None or sparklines or plots is not None
        form = "terminal" if sys.stdout.isatty() and not about_card else "md"
    path = audit_at(audit)
    unfinished = None
    try:
        saved = read_audit(path)
    except UnfinishedError as error:  # what is measured so far, and how to finish it
        from qaudit.judging import judge_so_far

        saved, unfinished = judge_so_far(path), error
    if form != "md" and (into is not None or sparklines):
        raise UsageError(
            f"`--into` and `--sparklines` are about the card, and `{form}` is not the card",
            hint="leave `--format` out",
        )
    if plots is not None:
        write(saved, plots)
    code = 0 if unfinished is None else unfinished.code
    if unfinished is not None:
        say(f"{unfinished.message}; {unfinished.hint}")
    folder = path if path.is_dir() else path.parent
    if form != "md":
        if form == "html" and find_spec("matplotlib") is None:
            say(f"matplotlib is not installed: the pictures are those in {folder / PICTURES}")
        plots_at = folder / PICTURES if unfinished is None else None
        print_result(render(saved, form, plots_at, shown_at=str(folder)))
        return code
    place, pictures_at = plots or folder / PICTURES, None
    has_pictures = not sparklines and (unfinished is None or plots is not None)
    if has_pictures and into is None:
        pictures_at = PICTURES if plots is None else plots.as_posix()
    elif has_pictures and into is not None and place.is_dir():
        pictures_at = Path(os.path.relpath(place.resolve(), into.resolve().parent)).as_posix()
    elif has_pictures:
        say(f"no pictures in {place}: the card has lines of text instead; `--plots` draws them")
    has_dark = any(place.glob("*-dark.svg"))
    card = render_card(saved, pictures_at=pictures_at, has_dark=has_dark)
    if into is None:
        print_result(card)
    else:
        write_block(card, into)
        say(f"wrote the card into {into}")
    return code


_AUDIT = "An output folder, its audit.json, or a published one (`org/name@v1`)."


def diff(
    a: Annotated[str, typer.Argument(metavar="EARLIER", help=f"The earlier audit. {_AUDIT}")],
    b: Annotated[str, typer.Argument(metavar="LATER", help="The later audit, named likewise.")],
    form: Annotated[str, option(OUTPUT, "terminal, md or json.", "--format")] = "terminal",
) -> int:
    """Show what changed from one saved audit to another, and what may have caused it.

    This is no gate: it exits with 0 whatever changed, once the two can be compared.

    Example: qaudit diff qaudit-out/demo qaudit-out/demo
    """
    from qaudit.judge.diff import Side
    from qaudit.judge.diff import diff as compare
    from qaudit.report.diff import FORMATS
    from qaudit.report.format import renderer_of
    from qaudit.saved.evidence import read_saved

    render = renderer_of(form, FORMATS)  # a wrong one is refused before anything is downloaded
    audits = [(target, read_saved(audit_at(target)).checked()) for target in (a, b)]
    before, after = (Side(name, saved.audit, saved.table.measurements) for name, saved in audits)
    print_result(render(compare(before, after)))
    return 0


_NEXT = "Suggest checkpoints to measure next, from this audit of the series."
After = option(MEASURE, _NEXT, metavar="AUDIT")
Check = option(MEASURE, "Read every file tree, so that equal revisions are known.", "--check")
NARROWEST, WIDEST = 80, 120
PROMISING, MOST_SUGGESTED = 0.05, 3
"""The least chance of being better than the best measured checkpoint, and how many to name."""


@with_settings("checkpoints", keys=("last", "family"))
def series(
    targets: Targets,
    *,
    check: Annotated[bool, Check] = False,
    after: Annotated[str | None, After] = None,
    everything: Annotated[bool, option(OUTPUT, "Show every row; fold none.", "--all")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **settings: Any,
) -> int:
    """Show a series: stage, step, tokens, learning rate, size, and what is odd.

    What a scan would measure is marked. Names cost one request to the Hub; only the file trees
    of selected checkpoints are read, and kept, unless `--check` reads all. `--after` predicts
    from an audit what the other checkpoints would show, and names the most promising.

    Example: qaudit series allenai/OLMo-2-1124-7B --check
    """
    from qaudit.cli.progress import Progress
    from qaudit.planning.survey import read_catalog
    from qaudit.recipe.table import recipe_and_options
    from qaudit.report.plan import catalog_to_json, render_catalog

    recipe, _ = recipe_and_options(*targets, **settings)
    with Progress(quiet=quiet) as progress:
        catalog, failures = read_catalog(recipe, progress, check=check)
    if after is not None:
        print_result(_suggested(after, catalog, as_json=as_json))
    elif as_json:
        print_result(catalog_to_json(catalog))
    else:
        columns = min(WIDEST, max(NARROWEST, shutil.get_terminal_size().columns))
        width = columns if sys.stdout.isatty() else None  # a file takes the whole table
        print_result(render_catalog(catalog, width=width, everything=everything))
    for reason, times in failures.items():
        say(f"{times} of the trees could not be read: {reason}")
    return 3 if check and failures else 0


def _suggested(after: str, catalog: Catalog, *, as_json: bool) -> str:
    from qaudit.judge.scores import suggest
    from qaudit.report.format import printable
    from qaudit.report.plan import render_suggestion, suggestion_to_json
    from qaudit.saved.evidence import read_saved

    saved = read_saved(audit_at(after)).checked()
    audited = {subject.label for subject in saved.audit.subjects}
    if not any(checkpoint.label in audited for checkpoint in catalog.checkpoints):
        raise UsageError(
            f"no checkpoint of `{', '.join(catalog.targets)}` is in the audit `{after}`",
            hint="name an audit of the same series",
        )
    pick = saved.audit.pick
    if pick is None:
        raise UsageError(
            f"the audit `{after}` has no finite quantized loss", hint="scan with `--schemes`"
        )
    suggestion = suggest(saved.table, catalog.checkpoints, pick.scheme)
    promising = [row.label for row in suggestion.prospects if row.better > PROMISING]
    if promising:
        names = (f"--checkpoints {shlex.quote(printable(n))}" for n in promising[:MOST_SUGGESTED])
        say(f"to measure the most promising, add to the scan: {' '.join(names)}")
    return suggestion_to_json(suggestion) if as_json else render_suggestion(suggestion)


# ------------------------------------------------------------------ on the Hub, on a page

_WRITE, _SAME = "What to write", {"show_default": "the one with the same weights"}
_NOTHING = "Print the files and every change of the README; write nothing."
Contained = option(_WRITE, "The subject that REPO contains.", **_SAME)
Title = option(_WRITE, "Title of the pull request; `[qaudit]` is appended.")
Preview = option(OUTPUT, _NOTHING, "--dry-run")
Json = option(OUTPUT, "Print what was written, and where, as JSON.", "--json")


def publish(
    audit: AuditPlace,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="A model on the Hub: `org/name`.")],
    subject: Annotated[str | None, Contained] = None,
    message: Annotated[str, Title] = "Add a quantization audit",
    dry_run: Annotated[bool, Preview] = False,
    as_json: Annotated[bool, Json] = False,
    quiet: Quiet = False,
) -> int:
    """Open a pull request on the Hub with the card, the audit and its evidence.

    Run again with the same audit, it finds its own pull request; with a newer one, it adds to
    it. The token is that of `hf auth login` or `HF_TOKEN`, and goes nowhere else.

    Example: qaudit publish qaudit-out/demo org/name --dry-run
    """
    from qaudit.cli.progress import Progress
    from qaudit.hub import open_hub
    from qaudit.hub.publish import (
        audit_folder,
        description_of,
        propose,
        read_for_publishing,
        submit,
        title_of,
    )

    repo, title = repository(repo), title_of(message)
    with Progress(quiet=quiet) as progress:
        folder = read_for_publishing(audit_folder(audit, progress))
        hub = open_hub(progress)
        plan = propose(folder, repo, hub, subject)
        if dry_run:
            url, difference = plan.onto.url if plan.onto else None, "\n".join(_difference(plan))
            rows = {"state": "dry run", "url": url, **_rows(plan), "readme_diff": difference}
            preview = json.dumps(rows, indent=2) if as_json else _preview(plan, hub)
            print_result(preview)
            return 0
        for text in plan.notes:
            progress.note(text)
        count = partial(progress.count, "files")
        submitted = submit(plan, description_of(folder), hub, title, count)
    if as_json:
        rows = {"state": submitted.state, "url": submitted.url, **_rows(submitted.plan)}
        print_result(json.dumps(rows, indent=2))
    else:
        print_result(f"{submitted.state}: {submitted.url}")
    return 0


def repository(text: str) -> str:
    from qaudit.hub.answers import repository_of

    ref = repository_of(text)
    if ref is None or ref.revision is not None or ref.subfolder is not None:
        what = "names a revision" if "@" in text else "is no name of a repository"
        raise UsageError(
            f"`{text}` {what}", hint="write `org/name`: a pull request is opened for its `main`"
        )
    return ref.location


def _preview(plan: PublishPlan, hub: Hub) -> str:
    from tabulate import tabulate

    from qaudit.report.format import plural, printable
    from qaudit.support.sizes import size

    page = f"{hub.client.endpoint}/{plan.repo}"
    opened = f"would open a pull request at {page}/discussions"
    if plan.onto is not None:
        opened = f"{'already open' if plan.is_done else 'would update'}: {plan.onto.url}"
    elif plan.is_done:
        opened = f"already published: {page}"
    elif not hub.client.logged_in:
        opened += " (not logged in: there may be an open one already)"
    rows: list[tuple[str, str, str]] = [
        (file.path_in_repo, f"{file.upload_info.size:,}", state) for file, state in plan.files
    ]
    rows += [(path, "", "removed") for path in plan.removed]
    table = tabulate(rows, ("file", "bytes", ""), tablefmt="plain", disable_numparse=True,
                     colalign=("left", "right", "left"))  # fmt: skip
    count, nbytes = len(plan.additions), sum(file.upload_info.size for file in plan.additions)
    sent = f"{plural(count, 'file')} to send, {size(nbytes)}; nothing was written"
    lines = [opened, "", table, "", sent, *(f"note: {printable(text)}" for text in plan.notes)]
    if difference := _difference(plan):
        lines += ["", *map(printable, difference)]
    return "\n".join(lines)


def _difference(plan: PublishPlan) -> list[str]:
    from qaudit.hub.publish import README

    before, after = (text.splitlines() for text in plan.readme)
    names = (README if plan.readme[0] else "/dev/null", README)
    return list(difflib.unified_diff(before, after, *names, lineterm=""))


def _rows(plan: PublishPlan) -> dict[str, Any]:
    return {
        "repo": plan.repo,
        "commit": plan.commit,
        "files": [
            {
                "path": file.path_in_repo,
                "nbytes": file.upload_info.size,
                "sha256": file.upload_info.sha256.hex(),
                "state": state,
            }
            for file, state in plan.files
        ],
        "removed": list(plan.removed),
        "notes": list(plan.notes),
    }


def gallery(
    audits: Annotated[
        list[str],
        typer.Argument(
            metavar="AUDIT...", help="Output folders, or published audits (`org/name@v1`)."
        ),
    ],
    out: Annotated[Path, option(OUTPUT, "The folder of the page.", "--out")],
) -> int:
    """Write a page of many audits, and a Parquet table of all their rows.

    Every number is computed again from evidence, and nothing else is shown. An audit that disagrees
    with its own is left out, and the exit code is that of its error.

    Example: qaudit gallery qaudit-out/demo --out site
    """
    from qaudit.gallery import rows_of, write_gallery

    rows, refused = rows_of(audits, audit_at)
    for error in refused:
        complain(error)
    if rows:
        write_gallery(rows, out)
        print_result(str(out / "index.html"))
    return max((error.code for error in refused), default=0)
