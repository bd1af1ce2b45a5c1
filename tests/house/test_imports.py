"""One-way imports, and every third-party package behind a fence.

Rooms are floors of one house: a room imports from the floors below it, never from its own floor
or above. An import under TYPE_CHECKING points somewhere too, so it counts; only a fence that
keeps a package from being *loaded* lets it pass.
"""

import graphlib
import subprocess
import sys
from fnmatch import fnmatch

import pytest

from tests.house.source import ROOT, imports, modules, room_of

FLOORS = tuple(
    frozenset(floor.split())
    for floor in (
        "__main__",
        "cli light",
        "gallery",
        "audit",
        "judging",
        "export rollouts",
        "executors",
        "tables",
        "diagnostics.measure",
        "engine",
        "planning",
        "downloads",
        "text",
        "items",
        "model",
        "hub",
        "formats",
        "checkpoints",
        "diagnostics.named",
        "report",
        "saved",
        "judge",
        "recipe policy families",
        "diagnostics",
        "core",
        "support",
        "types",
        "settings",
        "sandbox",
        "whole host",
        "errors",
        "version",
    )
)
"""From the top floor down. The package itself (`qaudit/__init__.py`) only loads the API.

Diagnostics, which other rooms look up by name (`diagnostics/diagnostic.py`), are above the report,
and only what measures them is above the engine.
"""

ROOMS = frozenset({""}.union(*FLOORS))


def below(room):
    """Return the rooms that a room may import: itself and every lower floor."""
    floor = next((k for k, rooms in enumerate(FLOORS) if room in rooms), len(FLOORS))
    if not room:
        return ROOMS  # `import qaudit` gives the API, loaded when it is used
    return frozenset({room}.union(*FLOORS[floor + 1 :]))


def named(words):
    return tuple(f"qaudit.{word}" for word in words.split())


ANYWHERE = ("*",)
MAY_LOAD = {
    "numpy": ANYWHERE,
    "scipy": ("qaudit.core.*", "qaudit.diagnostics.*"),
    "torch": (
        *named("""support.lazy core.* diagnostics.* engine.* model.* executors.* downloads.*
        export.* rollouts.generate planning.price checkpoints.safetensors formats.*
        checkpoints.adapters"""),
        "qaudit.planning.machine",  # only where there is a GPU
        "qaudit.checkpoints.header",  # pieces of DCP are pickles, too
    ),
    "triton": ("qaudit.core.*",),
    "bitsandbytes": ("qaudit.core.bnb_codes",),
    "gptqmodel": ("qaudit.export.runs",),
    "mlx": ("qaudit.export.runs",),
    "mlx_lm": ("qaudit.export.runs",),
    "vllm": ("qaudit.export.runs",),
    "tqdm": ("qaudit.export.runs",),  # where bars of other libraries are left out
    "transformers": (
        *named("""model.blocks model.skeleton model.groups model.config model.routes text.tokenizer
        export.runs rollouts.generate"""),
        "qaudit.engine.doctor",  # makes a model of one block
        "qaudit.checkpoints.configuration",  # a table of names, without torch
    ),
    "tokenizers": ("qaudit.text.tokenizer", "qaudit.planning.sizes"),
    "safetensors": ("qaudit.checkpoints.safetensors", "qaudit.engine.kept_weights"),
    "gguf": ("qaudit.formats.gguf.header",),
    "huggingface_hub": ("qaudit.hub.*",),
    "huggingface_hub.utils.tqdm": ("qaudit.hub.publish",),
    # What the client speaks through since 2.4; one answer is apart from what is asked.
    "httpx2": ("qaudit.hub.*",),
    # The client's own locks, so that both wait in turn; and one writer for an output folder.
    "filelock": ("qaudit.hub.*", "qaudit.saved.parts"),
    "pyarrow": ("qaudit.text.*", "qaudit.items.files", "qaudit.gallery"),
    "jinja2": ("qaudit.sandbox.child",),  # templates of others run in a process of their own
    # It builds the prompts of tasks, and nothing else.
    "lm_eval": ("qaudit.items.harness",),
    "zstandard": ("qaudit.items.answered",),  # logs of inspect; in Python itself from 3.14
    "datasets": ("qaudit.items.files",),  # what a data set's files are, by its own rules
    "psutil": ("qaudit.engine.*", "qaudit.planning.*", "qaudit.host"),
    "pydantic_core": ("qaudit.types.rows", "qaudit.saved.codec"),
    "pydantic": ("qaudit.saved.codec", "qaudit.recipe.table", "qaudit.policy*", "qaudit.families*"),
    "yaml": (
        "qaudit.support.foreign",  # the one place where files of others are read
        "qaudit.policy",  # where their nodes become lines
        "qaudit.hub.*",  # where the metadata of a README is written
    ),
    "pandas": ("qaudit.tables",),  # where it is installed
    "markdown_it": ("qaudit.report.markdown",),  # finds the card in a README
    "tabulate": ("qaudit.cli.*",),
    "matplotlib": ("qaudit.report.chart", "qaudit.diagnostics.plane"),
    "rich": ("qaudit.cli*",),
    "typer": ("qaudit.cli*",),
}

# Loading these takes seconds, so core and diagnostics import torch by its lazy name and the others
# inside functions: the registry imports all of them, and `--help`, `list` and every report need it.
LAZY = "qaudit.support.lazy."
DEFERRED = frozenset({"torch", "triton", "bitsandbytes"})


def wrong_directions(module):
    allowed = below(module.room)
    wrong = []
    for found in imports(module.tree):
        package, room = found.target.partition(".")[0], room_of(found.target)
        if package == "qaudit" and room in ROOMS and room not in allowed:
            wrong.append(f"{module.name}:{found.line} imports {found.target}")
    return wrong


def fence(target):
    """Return the narrowest name around an import that has a fence, or else its package.

    What the lazy torch gives is torch's: its rooms are the same, but it loads nothing at once.
    """
    if target.startswith(LAZY):
        return "torch"
    parts = target.split(".")
    around = (".".join(parts[:stop]) for stop in range(len(parts), 0, -1))
    return next((name for name in around if name in MAY_LOAD), parts[0])


def breached_fences(module):
    wrong = []
    for found in imports(module.tree):
        package = fence(found.target)
        if package == "qaudit" or package in sys.stdlib_module_names:
            continue
        where = f"{module.name}:{found.line}"
        if package not in MAY_LOAD:
            wrong.append(f"{where} imports `{package}`, which no fence names")
        elif found.typing:
            continue
        elif not any(fnmatch(module.name, pattern) for pattern in MAY_LOAD[package]):
            wrong.append(f"{where} imports `{package}`; it belongs in {MAY_LOAD[package]}")
        elif (
            module.room in {"core", "diagnostics"}
            and package in DEFERRED
            and not (found.deferred or found.target.startswith(LAZY))
        ):
            wrong.append(f"{where} imports `{package}` at once; take it from `support.lazy`")
    return wrong


def test_imports_point_one_way_and_packages_stay_behind_their_fences():
    assert {module.room for module in modules()} <= ROOMS
    assert [wrong for module in modules() for wrong in wrong_directions(module)] == []
    assert [breach for module in modules() for breach in breached_fences(module)] == []


def test_no_module_imports_itself_by_way_of_others():
    known = {module.name for module in modules()}
    graph = {}
    for module in modules():
        loaded = [found.target for found in imports(module.tree) if not found.typing]
        modules_loaded = {name if name in known else name.rpartition(".")[0] for name in loaded}
        graph[module.name] = (modules_loaded & known) - {module.name}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("house", ["qaudit.engine", "qaudit.report"])
def test_rooms_do_not_import_each_other_in_a_circle(house):
    def room(name):
        inside = name.removeprefix(f"{house}.") if name.startswith(f"{house}.") else ""
        return inside.partition(".")[0] or None

    graph = {}
    for module in modules():
        if (here := room(module.name)) is None:
            continue
        loaded = {room(found.target) for found in imports(module.tree) if not found.typing}
        graph.setdefault(here, set()).update(loaded - {here, None})
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_every_benchmark_can_be_imported():
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    names -= {"run_llmcompressor"}  # in that library's own environment
    program = "import " + ", ".join(f"benchmarks.{name}" for name in sorted(names))
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
