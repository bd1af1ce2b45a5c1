"""Serve a folder by hand: `python -m tests.support.hub ROOT --port 8765 --token hf_alice=alice`."""

import argparse
import contextlib
import json
import sys
import threading
from pathlib import Path

from tests.support.hub.server import Hub
from tests.support.hub.wire import __doc__ as FAULTS

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.support.hub", description=__doc__)
    parser.add_argument("root", type=Path, help="folder of <owner>/<name>/<revision>/files")
    parser.add_argument("--port", type=int, default=8765, help="the CDN's is the next; 0: any two")
    parser.add_argument("--token", action="append", default=[], metavar="TOKEN=USER[:read]")
    parser.add_argument("--faults", default="[]", metavar="JSON", help=FAULTS.splitlines()[0])
    arguments = parser.parse_args()
    hub = Hub(arguments.root, dict(text.split("=", 1) for text in arguments.token))
    hub.faults = json.loads(arguments.faults)
    with hub.running(arguments.port), contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write(f"HF_ENDPOINT={hub.url}\n" + "".join(f"  {key}\n" for key in hub.repos))
        sys.stdout.flush()
        threading.Event().wait()
