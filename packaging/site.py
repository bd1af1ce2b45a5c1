"""Build the documentation site, `site/`, from docs/: run by `make docs`.

Pages link to files of the repository that a site does not have. Those links become links to the
repository, on `main`; every other link must lead to a page or a file of the site, and to a heading
that is there, or the build fails. So does a script that a page loads from elsewhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS, PAGES, SITE = ROOT / "docs", ROOT / "build" / "pages", ROOT / "site"
SHOWN = {".md", ".png", ".svg", ".css", ".js", ".html", ".parquet"}
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#]+)")


def outside(page: Path, repository: str) -> str:
    """Return a page whose links to files that are no part of the site lead to the repository."""

    def link(match: re.Match[str]) -> str:
        target = (page.parent / match[2]).resolve()
        if target.is_relative_to(DOCS) and target.suffix in SHOWN:
            return match[0]
        return f"{match[1]}{repository}/blob/main/{target.relative_to(ROOT).as_posix()}"

    text = LINK.sub(link, page.read_text(encoding="utf-8"))
    return text.replace("<details>", '<details markdown="1">')  # or what is folded is no Markdown


def write_pages() -> None:
    """Copy pages and pictures."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.rmtree(PAGES, ignore_errors=True)
    for path in sorted(DOCS.rglob("*")):
        copy = PAGES / path.relative_to(DOCS)
        if path.suffix in SHOWN:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        if path.suffix == ".md":
            copy.write_text(outside(path, project["urls"]["Repository"]), encoding="utf-8")


class Page(HTMLParser):
    """The links of a page, and what may be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {""}
        self.scripts: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.add(values.get("id") or "")
        self.scripts.add(values.get("src") or "" if tag == "script" else "")
        self.links += [v for k in ("href", "src", "srcset") if (v := values.get(k))]


def broken(site: Path) -> Iterator[str]:
    """Yield every link within a site that leads nowhere."""
    files = (path.resolve() for path in site.rglob("*.html") if path.name != "404.html")
    pages = {path: Page(path) for path in files}
    for path, page in pages.items():
        for link in page.links:
            name, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", name) and link not in page.scripts:
                continue
            target = (path.parent / name).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].anchors if target in pages else {""}
            if not target.is_file() or anchor not in known:
                yield f"{path.relative_to(site.resolve())}: {link}"


def main() -> int:
    write_pages()
    command = [Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict"]
    subprocess.run(command, cwd=ROOT, check=True)
    lost = sorted(set(broken(SITE)))
    print("\n".join(lost) or f"{SITE.name}/index.html: every link leads somewhere")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
