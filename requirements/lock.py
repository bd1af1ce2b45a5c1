"""Write run.lock and dev.lock from what is installed in this environment.

    .venv/bin/python requirements/lock.py        (or: make lock)

The closure of pyproject.toml's requirements is walked through the installed packages' own
metadata, and every member is pinned to the version found. run.lock is what `make demo` needs
(the dependencies and the build backend), dev.lock adds what checking and testing need, and
judge.lock is the part of run.lock that `gate`, `diff` and `report` need, without torch.
Markers are evaluated for every supported Python and platform, so that one lock serves all.

Local versions are dropped: `torch 2.13.0+cpu` becomes `torch==2.13.0`, and the index decides
whether that is a CPU or a CUDA build. For the same reason run.lock and dev.lock have no hashes. The
libraries a CUDA build brings along are pinned by torch itself. judge.lock has the hashes of the
wheels that pip takes on each platform, so that a gate in CI installs what was tested or nothing.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
HEADER = "# Made by `make lock` from the ranges in pyproject.toml. Do not edit.\n"
JUDGE = (
    "huggingface-hub",
    "markdown-it-py",
    "numpy",
    "psutil",
    "pydantic",
    "pyyaml",
    "rich",
    "scipy",
    "tabulate",
    "typer",
)
"""Those of the dependencies that judging a saved audit needs; the others are for measuring."""

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = (
    ("manylinux_2_28_x86_64", "manylinux2014_x86_64", "manylinux_2_17_x86_64"),
    ("manylinux_2_28_aarch64", "manylinux2014_aarch64", "manylinux_2_17_aarch64"),
    ("macosx_14_0_arm64", "macosx_12_0_arm64", "macosx_11_0_arm64", "macosx_11_0_universal2"),
    ("win_amd64",),
)
ENVIRONMENTS = [
    {"python_version": python, "python_full_version": f"{python}.0", **platform}
    for python, platform in itertools.product(
        PYTHONS,
        (
            {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"},
            {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"},
        ),
    )
]


def applies(marker: Marker | None, extras: Iterable[str]) -> bool:
    """Say whether a requirement is needed anywhere that is supported."""
    return marker is None or any(
        marker.evaluate({**environment, "extra": extra})
        for environment in ENVIRONMENTS
        for extra in (*extras, "")
    )


def closure(requirements: Iterable[str]) -> dict[str, str]:
    """Return name -> version of everything the requirements bring in."""
    pins: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = [Requirement(text) for text in requirements]
    while queue:
        requirement = queue.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            print(f"lock: `{requirement}` is not installed here, left open", file=sys.stderr)
            continue
        pins[canonicalize_name(found.metadata["Name"])] = found.version.partition("+")[0]
        children = [Requirement(text) for text in found.requires or ()]
        queue += [child for child in children if applies(child.marker, requirement.extras)]
    return pins


def main() -> None:
    """Write the files."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    build = [*project["build-system"]["requires"], "editables"]  # editables: for `pip install -e`
    run = closure([*project["project"]["dependencies"], *build])
    judge = closure(
        text
        for text in project["project"]["dependencies"]
        if canonicalize_name(Requirement(text).name) in JUDGE
    )
    dev = closure(project["project"]["optional-dependencies"]["dev"])
    extra = {name: version for name, version in dev.items() if name not in run}
    (HERE / "run.lock").write_text(HEADER + lines(run))
    (HERE / "judge.lock").write_text(HEADER + lines(judge, hashes_of(judge)))
    (HERE / "dev.lock").write_text(HEADER + "-r run.lock\n" + lines(extra))


def lines(pins: dict[str, str], hashes: Mapping[str, Iterable[str]] | None = None) -> str:
    """Print pins in name order, each with the hashes of its files."""
    text = ""
    for name, version in sorted(pins.items()):
        known = "".join(
            f" \\\n    --hash=sha256:{one}" for one in sorted((hashes or {}).get(name, ()))
        )
        text += f"{name}=={version}{known}\n"
    return text


def hashes_of(pins: dict[str, str]) -> dict[str, set[str]]:
    """Return the hashes of the wheels that pip chooses for each Python on each platform."""
    hashes: dict[str, set[str]] = {}
    for python, platforms in itertools.product(PYTHONS, PLATFORMS):
        with tempfile.TemporaryDirectory() as scratch:
            wanted, report = Path(scratch) / "wanted.txt", Path(scratch) / "report.json"
            wanted.write_text(lines(pins))
            tags = [word for platform in platforms for word in ("--platform", platform)]
            done = subprocess.run(
                [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed",
                 "--no-deps", "--only-binary", ":all:", "--python-version", python, *tags,
                 "--target", scratch, "--report", str(report), "-r", str(wanted)],
                check=False,
            )  # fmt: skip
            if done.returncode:
                print(f"lock: no hashes for Python {python} on {platforms[0]}", file=sys.stderr)
                continue
            for item in json.loads(report.read_text())["install"]:
                name = canonicalize_name(item["metadata"]["name"])
                hashes.setdefault(name, set()).add(
                    item["download_info"]["archive_info"]["hashes"]["sha256"]
                )
    return hashes


if __name__ == "__main__":
    main()
