"""Serve a folder by hand: `python -m tests.support.hub ROOT --port 8765 --token hf_alice=alice`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
from pathlib import Path

from tests.support.hub.server import Hub
from tests.support.hub.wire import __doc__ as FAULTS


def main() -> None:
    """Read the arguments and serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.hub", description=__doc__)
    parser.add_argument("root", type=Path, help="folder of <owner>/<name>/<revision>/files")
    parser.add_argument(
        "--port", type=int, default=8765, help="the CDN takes the next one; 0: any two"
    )
    parser.add_argument("--page", type=int, default=1000, help="entries in a page of a listing")
    parser.add_argument("--token", action="append", default=[], metavar="TOKEN=USER[:read]")
    parser.add_argument("--faults", default="[]", metavar="JSON", help=FAULTS.splitlines()[0])
    arguments = parser.parse_args()
    hub = Hub(
        arguments.root,
        tokens=dict(text.split("=", 1) for text in arguments.token),
        page=arguments.page,
    )
    hub.faults = json.loads(arguments.faults)
    with hub.running(arguments.port):
        sys.stdout.write(f"HF_ENDPOINT={hub.url}\n")
        sys.stdout.writelines(f"  {key}\n" for key in hub.repos)
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
