"""A local Hugging Face Hub that the unmodified client takes for the real one.

    with Hub(root, tokens={"hf_bob": "bob"}).running() as hub:
        HfApi(endpoint=hub.url) ...
        hub.faults.append({"match": "GET /cdn", "cut": 1000, "times": 1})

    python -m tests.support.hub ROOT --port 8765 --token hf_alice=alice

Folders are served as repos (folders.py), every id is the one that git would give (contents.py), and
what goes wrong is said by the test (faults.py). What the real Hub has and this one lacks: the
content-addressed xet storage, git over HTTP, spaces, renamed repos, and the making of repos.
"""

from tests.support.hub.contents import write_header, write_headers
from tests.support.hub.server import Hub

__all__ = ["Hub", "write_header", "write_headers"]
