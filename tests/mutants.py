"""How much the tests protect: draw wrong lines of the package, count those that no test notices.

    python -m tests.mutants reach DATA             runs the suite: which test reaches which line
    python -m tests.mutants draw DATA --count 300 --seed 1 > table.tsv

`reach DATA --tests tests/judge` and `draw DATA --under qaudit/judge` do the same for one room.

    python -m tests.mutants draw DATA --again table.tsv > before.tsv
    python -m tests.mutants paired before.tsv table.tsv

The first, in a tree with an earlier suite of the same package, tries what `table.tsv` did not kill:
a suite that only lost tests kills no more than it did before. The second compares the survivors.

A mutant changes one expression of one function. The tests that reach its line run in a process of
their own, the shortest first, until one fails. `alive` is a mutant that all of them pass,
`unreached` a line that no test reaches, `slow` one whose tests took longer than `--seconds`.

Each worker changes a copy of the tree, so that processes which tests start see the mutant, too. It
imports the large libraries once and forks for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import Queue
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = """
[run]
source = qaudit
parallel = true
patch = subprocess
context = ${PYTEST_CURRENT_TEST-}
"""
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed expression."""

    path: str
    lines: range  # of the expression, from the first line of its statement on
    where: slice  # the bytes that are replaced
    replacement: str

    def text(self) -> bytes:
        """Return the whole file with the change."""
        source = (ROOT / self.path).read_bytes()
        replacement = f"({self.replacement})".encode()
        return source[: self.where.start] + replacement + source[self.where.stop :]

    def is_valid(self) -> bool:
        """Return whether the change can be parsed: a pattern takes no expression."""
        with suppress(SyntaxError):
            return bool(ast.parse(self.text()))
        return False


def changes(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield every wrong version of a node: the part that is replaced, and by what."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            yield (
                node,
                ast.unparse(ast.Compare(node.left, [SWAPPED[type(operator)]()], node.comparators)),
            )
        case ast.BinOp(op=operator) if type(operator) in SWAPPED:
            if not isinstance(node.left, ast.Constant | ast.JoinedStr):  # text put together
                yield node, ast.unparse(ast.BinOp(node.left, SWAPPED[type(operator)](), node.right))
        case ast.BoolOp(op=operator):
            yield node, ast.unparse(ast.BoolOp(SWAPPED[type(operator)](), node.values))
        case ast.UnaryOp(op=ast.Not()):
            yield node, ast.unparse(node.operand)
        case ast.If() | ast.IfExp() | ast.While():
            yield node.test, f"not ({ast.unparse(node.test)})"
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int()):
            yield node, str(node.value + 1)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield value, "None"
        case ast.Expr(value=ast.Call() as call):
            yield call, "None"


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of the functions of a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    texts = {
        id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in ast.walk(n)
    }
    statements: dict[int, tuple[ast.AST, int]] = {}  # the innermost statement around each node
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in (
                n for s in function.body for n in ast.walk(s) if isinstance(n, ast.stmt)
            ):
                statements |= {id(n): (n, statement.lineno) for n in ast.walk(statement)}
    for node, begin in statements.values():
        if id(node) in texts:  # positions inside f-strings are those of the string
            continue
        for part, replacement in changes(node):
            assert part.end_lineno is not None and part.end_col_offset is not None
            first = starts[part.lineno - 1] + part.col_offset
            last = starts[part.end_lineno - 1] + part.end_col_offset
            yield Mutant(
                path.relative_to(ROOT).as_posix(),
                range(min(begin, part.lineno), part.end_lineno + 1),
                slice(first, last),
                replacement,
            )


def reach(data: Path, tests: Sequence[str]) -> None:
    """Run the tests once; note which test reaches which line, and how long each takes."""
    data.mkdir(parents=True, exist_ok=True)
    (data / "coveragerc").write_text(CONFIGURATION, "utf-8")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-q", "--cov",
         f"--cov-config={data / 'coveragerc'}", "--cov-context=test", "--cov-report=",
         f"--junitxml={data / 'junit.xml'}", *tests],
        cwd=ROOT, env={**os.environ, "COVERAGE_FILE": str(data / "coverage")}, check=False,
    )  # fmt: skip


def durations(data: Path) -> dict[str, float]:
    """Return the seconds of each function of a test: `tests/judge/test_a.py::test_b`."""
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(data / "junit.xml").getroot().iter("testcase"):
        module = case.attrib["classname"].replace(".", "/") + ".py"
        name = f"{module}::{case.attrib['name'].split('[')[0]}"
        seconds[name] = seconds.get(name, 0.0) + float(case.attrib["time"])
    return seconds


def tests_of(contexts: Sequence[str]) -> list[str]:
    """Return the functions of tests that contexts of coverage name."""
    named = (part for context in contexts for part in context.split("[")[0].split("|"))
    return sorted({part.split(" (")[0] for part in named if "::" in part})


class Worker:
    """A copy of the tree, and a process that has the large libraries and forks for each mutant."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tracked = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name in tracked.stdout.strip("\0").split("\0"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        for command in (["init", "-q"], ["add", "-A"]):  # tests list what is tracked
            subprocess.run(["git", *command], cwd=folder, check=True)
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "tests" / "mutants.py"), "serve"],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def try_out(self, mutant: Mutant | None, tests: Sequence[str], seconds: float) -> str:
        """Return what became of a mutant: `killed`, `alive` or `slow`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        place = self.folder / (mutant.path if mutant else "README.md")
        before = place.read_text("utf-8")
        try:
            if mutant:
                place.write_bytes(mutant.text())
            self.process.stdin.write(f"{seconds} {' '.join(tests)}\n")
            self.process.stdin.flush()
            return self.process.stdout.readline().strip()
        finally:
            place.write_text(before, "utf-8")


def serve() -> None:
    """Answer lines of tests with what became of them, each run in a fork."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path.insert(0, str(Path.cwd()))
    import matplotlib.figure
    import pytest
    import scipy.stats
    import torch
    import transformers  # noqa: F401

    del matplotlib, scipy, torch
    for line in sys.stdin:
        seconds, *tests = line.split()
        child = os.fork()
        if not child:
            os.setsid()
            # Plugins that the large libraries have already imported cannot be rewritten.
            known = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            arguments = ["-x", "-q", "-p", "no:cacheprovider", *known, *tests]
            code = 2
            try:
                code = int(pytest.main(arguments))
            finally:
                os._exit(code)
        limit = time.monotonic() + float(seconds)
        answer = "slow"
        while time.monotonic() < limit:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                answer = "killed" if status else "alive"
                break
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if answer == "slow":
            os.waitpid(child, 0)
        answers.write(answer + "\n")
        answers.flush()


def fates(table: Path) -> dict[str, str]:
    """Return what became of each mutant of a table, by its place and change."""
    rows = (line.split("\t", 1) for line in table.read_text("utf-8").splitlines())
    return {row[1]: row[0] for row in rows if len(row) == 2 and "\t" in row[1] and ":" in row[1]}


def paired(before: Path, after: Path) -> None:
    """Print the difference in survivors of the same mutants, with an interval of 95 %.

    The interval is that of Agresti and Min (2005): half a pair is added to each of the four cells.
    """
    earlier, later = fates(before), fates(after)
    lost = [key for key, fate in later.items() if fate != "killed" and earlier[key] == "killed"]
    won = [key for key, fate in later.items() if fate == "killed" and earlier[key] != "killed"]
    count, b, c = len(later) + 2, len(lost) + 0.5, len(won) + 0.5
    middle, half = (b - c) / count, 1.96 * ((b + c) - (b - c) ** 2 / count) ** 0.5 / count
    print(
        f"{len(later)} mutants: {len(lost)} more survive, {len(won)} fewer; difference "
        f"{100 * (len(lost) - len(won)) / len(later):.2f} points "
        f"[{100 * (middle - half):.2f}, {100 * (middle + half):.2f}]"
    )
    print(*lost, sep="\n")


def draw(
    data: Path, under: Path, count: int, seed: int, seconds: float, workers: int,
    again: Path | None,
) -> None:  # fmt: skip
    """Print what became of `count` mutants, drawn from all lines that do not run at import.

    With a table of them, `again`, those that it killed are not tried: they count as killed.
    """
    import coverage

    reached = coverage.CoverageData(str(data / "coverage"))
    reached.read()
    took = durations(data)
    everything = [m for path in sorted(under.rglob("*.py")) for m in mutants(path)]
    random.Random(seed).shuffle(everything)
    drawn = [*islice((mutant for mutant in everything if mutant.is_valid()), count)]
    lines: dict[str, dict[int, list[str]]] = {
        name: reached.contexts_by_lineno(str(ROOT / name)) for name in {m.path for m in drawn}
    }
    tally: dict[str, int] = {}
    killed = fates(again) if again else {}

    def spelled(mutant: Mutant) -> str:
        before = (ROOT / mutant.path).read_bytes()[mutant.where].decode()
        change = " ".join(f"{before} -> {mutant.replacement}".split())
        return f"{mutant.path}:{mutant.lines[-1]}\t{change[:160]}"

    with tempfile.TemporaryDirectory() as scratch:
        idle: Queue[Worker] = Queue()
        for number in range(workers):
            worker = Worker(Path(scratch) / str(number))
            if worker.try_out(None, ["tests/house/test_habits.py"], seconds) != "alive":
                sys.exit("a test fails without any mutant")
            idle.put(worker)

        def judge(mutant: Mutant) -> str:
            if killed.get(spelled(mutant)) == "killed":
                return "killed"
            at = lines[mutant.path]
            tests = tests_of([context for line in mutant.lines for context in at.get(line, [])])
            if not tests:
                return "unreached"
            worker = idle.get()
            try:
                tests.sort(key=lambda name: took.get(name, 1.0))
                return worker.try_out(mutant, tests, seconds)
            finally:
                idle.put(worker)

        with ThreadPoolExecutor(workers) as pool:
            for mutant, fate in zip(drawn, pool.map(judge, drawn), strict=True):
                tally[fate] = tally.get(fate, 0) + 1
                print(f"{fate}\t{spelled(mutant)}", flush=True)
        for _ in range(workers):
            idle.get().process.kill()
    print("\t".join(f"{name} {number}" for name, number in sorted(tally.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("reach", "draw", "paired", "serve"))
    parser.add_argument("data", type=Path, nargs="?", default=ROOT / "runs" / "mutants")
    parser.add_argument("table", type=Path, nargs="?")
    parser.add_argument("--tests", nargs="*", default=[])
    parser.add_argument("--under", type=Path, default=ROOT / "qaudit")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", type=Path)
    chosen = parser.parse_args()
    if chosen.what == "reach":
        reach(chosen.data.resolve(), chosen.tests)
    elif chosen.what == "serve":
        serve()
    elif chosen.what == "paired":
        paired(chosen.data, chosen.table)
    else:
        data, under = chosen.data.resolve(), chosen.under.resolve()
        limits = chosen.count, chosen.seed, chosen.seconds, chosen.workers
        draw(data, under, *limits, chosen.again)


if __name__ == "__main__":
    main()
