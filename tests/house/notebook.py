"""Run the notebook, and write what its cells show into it.

    python -m tests.house.notebook

It scans a part of the demo in a folder of its own, for about half a minute.
"""

import ast
import contextlib
import io
import json
import os
import sys
import tempfile

from tests.house.source import ROOT

NOTEBOOK = ROOT / "docs" / "which-to-ship.ipynb"
VIEWS = {"text/html": "_repr_html_", "text/markdown": "_repr_markdown_"}


def run(code, scope):
    """Run code as a notebook does: the value of a last expression is returned."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec", dont_inherit=True), scope)
    return (
        None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), scope)
    )


def results(cells):
    """Run the cells of code in this folder; return what each shows, by its type."""
    scope = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = run("".join(cell["source"]), scope)
        views = {
            kind: getattr(value, name)() for kind, name in VIEWS.items() if hasattr(value, name)
        }
        text = {} if value is None or views else {"text/plain": repr(value)}
        stream = {"stream": printed.getvalue()} if printed.getvalue() else {}
        shown.append({**stream, **views, **text})
    return shown


def outputs(shown, number):
    """Return what a cell shows, in the notebook's format."""
    made = []
    if text := shown.get("stream"):
        made.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(True)})
    data = {kind: text.splitlines(True) for kind, text in shown.items() if kind != "stream"}
    if data:
        made.append(
            {
                "data": data,
                "execution_count": number,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return made


def main():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        shown = results(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, seen) in enumerate(zip(code, shown, strict=True), 1):
        cell |= {"outputs": outputs(seen, number), "execution_count": number}
    notebook["metadata"]["language_info"]["version"] = sys.version.partition(" ")[0]
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    NOTEBOOK.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
