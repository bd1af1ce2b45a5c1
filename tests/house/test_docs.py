"""Every command that a page shows is understood, every link leads, and every example works."""

import re
import runpy
import shlex
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import typer.main

from experiments.__main__ import app as experiments
from experiments.table import read_experiment
from qaudit.cli.app import app
from qaudit.core.linears import Linears
from qaudit.core.merge import Merge
from qaudit.core.scheme import Scheme
from qaudit.diagnostics.diagnostic import Diagnostic
from qaudit.errors import AuditError
from qaudit.families import load_file
from qaudit.policy import read_policy
from qaudit.recipe.table import find_recipe, is_recipe, read_recipe
from qaudit.settings import settings_of
from tests.house.commands import PAGE as OPTIONS
from tests.house.commands import commands
from tests.house.commands import page as page_of_options
from tests.house.readme import FINDINGS, GGUF, findings, gguf
from tests.house.source import PACKAGE, ROOT
from tests.support import gate_sample, sample

PAGES = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_THE_ROOT = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
MOST_WORDS, MOST_PAGES, MOST_WORDS_OF_THE_README = 30_000, 32, 750
WORDS_OF_THE_CARD = 1_000  # of the demo, which has 12 kB at most
# Of `hf download` and of pip, of lm-eval, of llama-quantize, and of sbatch.
OF_OTHERS = """--revision --no-deps --index-url --log_samples --pure --imatrix
    --account --gres --cpus-per-task --mem --time"""
GROUP = typer.main.get_command(app)
COMMANDS_BY_NAME = dict(commands(GROUP))
OF_EXPERIMENTS = [
    parameter.opts
    for command in typer.main.get_group(experiments).commands.values()
    for parameter in command.params
]


def shown(page):
    """Return the `qaudit` commands of a page, without their comments."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line[2:] for line in lines if line.startswith("$ qaudit")]


COMMANDS = [(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in shown(page)]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_in_a_page_is_understood(page, line):
    words = shlex.split(line, comments=True)[1:]
    if words == ["--help"]:
        return
    depth = 1 if tuple(words[:1]) in COMMANDS_BY_NAME else 2
    rest = words[depth:]
    with GROUP.make_context("qaudit", [words[0], "--help"], resilient_parsing=True) as group:
        COMMANDS_BY_NAME[tuple(words[:depth])].make_context(words[depth - 1], [*rest], parent=group)
    for option, word in pairwise(["", *rest]):
        if is_recipe(word) and option != "--policy":
            read_recipe(find_recipe(word))


def test_every_option_and_key_that_pages_and_hints_speak_of_is_there():
    whole = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    text = re.sub(r"^(#SBATCH|srun) .*", "", whole, flags=re.MULTILINE)
    said = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", text))
    known = {
        option
        for command in COMMANDS_BY_NAME.values()
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    known |= {option for options in OF_EXPERIMENTS for option in options}
    known |= {"--help", "--help-all", "--version", "--install-completion", "--show-completion"}
    known |= set(OF_OTHERS.split())
    assert said - known == set()
    files = [*PAGES, *sorted((ROOT / "qaudit").rglob("*.py")), *(ROOT / "recipes").glob("*.yaml")]
    of_experiments = ROOT / "docs" / "experiments.md"
    texts = (path.read_text(encoding="utf-8") for path in files if path != of_experiments)
    keys = {key for text in texts for key in re.findall(r"--set (\w+)=", text)}
    assert len(keys) > 20
    assert keys - settings_of().keys() == {"key"}


def test_links_of_pages_to_files_lead_somewhere():
    for page in (*PAGES, *OF_THE_ROOT):
        targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        assert [target for target in targets if not (page.parent / target).exists()] == [], page


def test_generated_pages_are_up_to_date_and_no_words_vanish_as_tags():
    for page, text in ((OPTIONS, page_of_options()), (FINDINGS, findings()), (GGUF, gguf())):
        assert page.read_text(encoding="utf-8") == text, "run `make readme`"
        plain = re.sub(r"`[^`\n]*`|```.*?```", "", text, flags=re.S)
        assert re.findall(r"<(?!!--)[a-z/][^>\n]*>", plain) == []


def test_pages_are_few_and_each_is_once_in_the_index_and_on_the_site_by_one_title():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[(.+?)\]\(([\w-]+\.md)\): \S", index, re.M)
    navigation = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    site = re.findall(r'{ "(.+?)" = "([\w-]+\.md)" }', navigation)
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert sorted(listed) == sorted(site)
    assert sorted(page for _, page in listed) == sorted(pages)
    short = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "card.md"]
    assert len(short) < MOST_PAGES
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in short)
    assert words <= MOST_WORDS - WORDS_OF_THE_CARD
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= MOST_WORDS_OF_THE_README


def test_the_table_of_rooms_names_every_room():
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = contributing.partition("## Where things go\n")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)/?`", "".join(re.findall(r"^\| (.*?) \|", section, re.M)))
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert rooms - set(named) == set()
    assert [name for name in named if not list(PACKAGE.glob(f"{name}*"))] == []


def test_links_on_the_site_to_files_that_it_has_not_lead_to_the_repository(tmp_path):
    script = runpy.run_path(str(ROOT / "packaging" / "site.py"))
    page = script["outside"](ROOT / "docs" / "README.md", "https://example.org/q")
    assert "](https://example.org/q/blob/main/CONTRIBUTING.md)" in page
    assert "](https://example.org/q/blob/main/plugins)" in page
    assert "](demo/card.md)" in page
    (tmp_path / "a.html").write_text('<a id="x" href="b.html#y">b</a><a href="#z">z</a>')
    (tmp_path / "b.html").write_text('<p id="y"><a href="a.html#x">a</a><img src="lost.png">')
    (tmp_path / "c.html").write_text('<a href="https://b.org"></a><script src="https://b.org/j">')
    lost = ["a.html: #z", "b.html: lost.png", "c.html: https://b.org/j"]
    assert sorted(script["broken"](tmp_path)) == lost


PREAMBLE = """
from dataclasses import dataclass
from typing import ClassVar
from qaudit.diagnostics.case import Case, Measure
from qaudit.diagnostics.diagnostic import Diagnostic
from qaudit.core.linears import Linears, Quantized, decoded, refuse_nonfinite
from qaudit.core.merge import Merge
from qaudit.core.scheme import Scheme
from qaudit.core.linears import IntegerCodes
from qaudit.errors import QauditError
from qaudit.report.format import printable
from qaudit.report.gate.checks import Answer
from qaudit.types import AuditRecord
"""
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def example(name):
    """Return the class or function of this name from the first block that defines it."""
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
    (block,) = (block for block in blocks if re.search(rf"^(class|def) {name}\(", block, re.M))
    scope = {"__name__": __name__}
    text = PREAMBLE + block.replace("\n...\n", "\n")
    exec(compile(text, "CONTRIBUTING.md", "exec", dont_inherit=True), scope)
    return scope[name]


def file_of(section, folder, name):
    """Write the YAML of a section into a file."""
    body = TEXT.partition(f"## {section}\n")[2].partition("\n## ")[0]
    block = re.search(r"^```yaml\n(.*?)^```", body, re.M | re.S)
    (folder / name).write_text(block[1], encoding="utf-8")
    return folder / name


def test_the_scheme_quantizes_and_the_merge_merges():
    scheme, merge = example("Sign")(), example("First")()
    assert isinstance(scheme, Scheme) and isinstance(merge, Merge)
    done = scheme.quantize(Linears({"a": torch.tensor([[1.0, -3.0], [0.0, 0.0]])}))
    assert done.weights["a"].tolist() == [[2.0, -2.0], [0.0, 0.0]]
    assert (done.bits, scheme.spec, set(done.stored)) == (2 * 4 + 2 * 16, "sign", {"a"})
    assert merge.merge([torch.ones(2), torch.zeros(2)], [0.5, 0.5]).tolist() == [1.0, 1.0]


def test_the_formats_of_the_report_and_of_the_gate_render():
    lines = example("render_lines")(sample.audit()).splitlines()
    assert len(lines) == len(sample.audit().measurements)
    assert re.fullmatch(r"stage1-step500 fp \d\.\d{4}", lines[0])
    assert example("word")(gate_sample.gate()) in {"pass", "fail", "inconclusive"}
    assert example("word")(AuditError("a", hint="b")) == "error"


def test_the_diagnostic_has_parameters_and_measures_rows():
    assert isinstance(example("Norms")(), Diagnostic)
    assert example("Norms")().spec == "norms"
    weights = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    case = SimpleNamespace(
        subject=SimpleNamespace(label="step10"),
        weights=lambda: SimpleNamespace(names=lambda: list(weights), read=weights.__getitem__),
    )
    (row,) = example("measure_norms")(case)
    assert (row.subject, row.norm) == ("step10", 5.0)


def test_the_policy_the_experiment_and_the_family_are_read(tmp_path):
    policy = read_policy(file_of("Add a policy that ships", tmp_path, "nightly.yaml"))
    assert [(rule.margin, rule.subjects) for rule in policy.rules] == [(0.05, ("@last",))]
    experiment = read_experiment(str(file_of("Add an experiment", tmp_path, "slow.yaml")))
    assert [run.name for run in experiment.runs][-1] == "slow"
    assert len(experiment.contrasts) == 1
    family = load_file(file_of("Add a model family", tmp_path, "acorn.yaml"))
    assert family.learning_rate(family.place("step1000")) == 2.5e-4
