"""Everything that judges, renders, parses or lists runs on a machine without torch.

A subprocess in which importing torch raises imports every module below engine, and runs the
commands that need no model. It also keeps the front door quick: `--help` loads no plotting,
no scipy and no model library.
"""

import os
import subprocess
import sys

from qaudit.saved.audits import to_json
from tests.house.source import ROOT, modules
from tests.support import sample

WORDS = """errors settings types core recipe policy judge checkpoints families report saved hub
    planning cli diagnostics diagnostics.price"""
ROOMS = {"", *WORDS.split()}
ROOMS |= {f"diagnostics.{part}" for part in ("judge", "section", "figure", "overlay")}

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "bitsandbytes", "triton"}:
            raise ImportError(f"`{name}` is blocked")

sys.meta_path.insert(0, Blocked())
"""


def run(code, *arguments):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("QAUDIT_")
    }
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCK + code, *arguments],
        cwd=ROOT,
        env=environment | {"COLUMNS": "80", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_module_below_the_engine_imports_without_torch():
    assert "`torch` is blocked" in run("import torch").stderr
    names = [module.name for module in modules() if module.room in ROOMS]
    assert len(names) > 10
    done = run("import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)", *names)
    assert done.returncode == 0, done.stderr


COMMAND = "from qaudit.cli import main\nmain()"


def test_the_command_line_answers_and_renders_an_audit_without_torch(tmp_path):
    (tmp_path / "audit.json").write_text(to_json(sample.audit()), encoding="utf-8")
    label = sample.audit().subjects[0].label
    for words, text in (
        (["scan", "--help"], "Usage"),
        (["list", "schemes"], "rtn"),
        (["report", str(tmp_path)], label),
    ):
        done = run(COMMAND, *words)
        assert done.returncode == 0, done.stderr
        assert text in done.stdout


def test_help_loads_nothing_heavy():
    watch = """
from qaudit.cli import main
try:
    main()
finally:
    heavy = {"numpy", "scipy", "matplotlib", "pydantic", "safetensors", "tokenizers"}
    heavy |= {"yaml", "rich", "huggingface_hub", "httpx2", "httpx"}
    print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    done = run(watch, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
