"""`qaudit fetch`: download what a plan needs, where there is a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qaudit.cli.options import Quiet, with_settings
from qaudit.cli.terminal import say


@with_settings("trust_remote_code")
def fetch(out: Path, *, quiet: Quiet = False, **settings: Any) -> int:
    """Download the texts, the small files and all weights of the plan in OUT; no torch is needed.

    Run it on a login node; the parts then run with HF_HUB_OFFLINE=1.

    Example: qaudit fetch out
    """
    from qaudit.cli.progress import Progress
    from qaudit.executors.fetching import fetch_all
    from qaudit.report.format import plural

    with Progress(quiet=quiet) as progress:
        fetched = fetch_all(out, code=bool(settings.get("trust_remote_code")), watch=progress)
    if not quiet:
        whole, texts = plural(fetched.checkpoints, "checkpoint"), plural(fetched.texts, "text")
        say(f"{fetched.whole} of {whole} and {texts} are in the cache")
        for label, reason in fetched.failed.items():
            say(f"not downloaded {label}: {reason}")
    return 3 if fetched.failed else 0
