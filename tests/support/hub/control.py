"""Faults and the log for tests in another process: `POST /_control/faults`, `GET /_control/log`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.hub.exchange import Reply, Request, as_json, refusal

if TYPE_CHECKING:
    from tests.support.hub.server import Hub

PREFIX = "_control"


def answer(hub: Hub, request: Request) -> Reply:
    """Do what a test asks for; none of it is logged, limited or spoilt by a fault.

    POST faults replaces the list; GET log?clear=1 empties it afterwards; POST remove takes
    {"repo": ..., "name": ...} and lets that revision vanish.
    """
    match request.method, request.segments[1:]:
        case "POST", ["faults"]:
            hub.faults[:] = request.json
        case "GET", ["faults"]:
            return as_json(hub.faults)
        case "POST", ["remove"]:
            hub.repos[request.json["repo"]].remove(request.json["name"])
        case "GET", ["leaks"]:
            return as_json(hub.leaks)
        case "GET", ["log"]:
            seen = list(hub.log)
            if request.flag("clear"):
                hub.log.clear()
            return as_json(seen)
        case _:
            raise refusal(404, "the controls are faults, log, leaks and remove")
    return as_json({})
