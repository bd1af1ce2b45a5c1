"""The path of a stranger: from the built wheel to a verdict, a file, its proof and its page.

Everything is run as a person runs it: by the installed command, in an environment that has the
wheel and what it depends on, in an empty folder, without a network but for a Hub on this machine.
What is asserted is what a person reads.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By

from tests.support.browser import browser, needs_browser
from tests.support.hub import Hub

pytestmark = pytest.mark.slow
TOKEN = "hf_strangers_own_secret"
AUDIT = "qaudit-out/demo"
SUBJECT, SCHEME = "soup", "gptq-4bit"
"""What ships at 4 bits."""

SCAN = ("scan", "demo", "--checkpoints", "stage2-*-step1000", "--schemes", "gptq-4bit,gptq-3bit")


@dataclass(frozen=True)
class Machine:
    """A machine of someone who has just installed qaudit."""

    home: Path
    bin: Path

    def run(self, *words, code=0, **environment):
        """Run `qaudit`; return what it prints as its result, and what it says beside it."""
        done = subprocess.run(
            [self.bin / "qaudit", *words],
            cwd=self.home,
            env={
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "HOME": str(self.home),
                "HF_HUB_OFFLINE": "1",
                "HF_HUB_DISABLE_XET": "1",  # the local Hub serves plain uploads
                "OMP_NUM_THREADS": "1",
                "LANG": "C.UTF-8",
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert "Warning" not in done.stderr
        return done.stdout, done.stderr


FIRST_SCREEN = """\
demo: # checkpoints, # soup, # schemes, # documents (#,# tokens)

        ships           bits  size    adds to loss      margin
# bits  soup gptq-#bit  #  # kB  # % [#, #]  # %     SHIP
# bits  soup gptq-#bit  #  # kB  # % [#, #]  # %     SHIP

The soup's loss at # bits is # nats lower than the last checkpoint's.
Not covered: kinds of text rarer than # in #.
# warning: four-bit-tail (qaudit explain four-bit-tail).

next  qaudit export qaudit-out/demo --bits # --out demo-w#
why   qaudit pick qaudit-out/demo
page  qaudit-out/demo/report.html
"""
"""What a person sees first, with `#` for each number."""


def fits(text):
    """Whether every line fits a terminal of 80 columns."""
    return max(map(len, text.splitlines())) <= 80


@pytest.fixture(scope="module")
def machine(wheel_file, tmp_path_factory):
    """Install the wheel in an environment of its own, beside the packages that are here."""
    place = tmp_path_factory.mktemp("machine")
    venv.create(place / "venv")
    python = place / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", wheel_file], check=True)
    (site,) = (place / "venv").glob("lib/*/site-packages")
    (site / "here.pth").write_text(sysconfig.get_path("purelib"))  # what qaudit depends on
    (place / "home").mkdir()
    return Machine(place / "home", place / "venv" / "bin")


@pytest.fixture(scope="module")
def scanned(machine):
    """Scan the series that ships, once for all tests."""
    return machine.run(*SCAN)


@pytest.fixture(scope="module")
def exported(machine, scanned):
    out, _ = machine.run("export", AUDIT, "--bits", "4", "--out", "demo-w4")
    assert out == "demo-w4\n"
    return machine.home / "demo-w4"


def test_the_installed_command_is_the_wheel_s(machine):
    where = "import qaudit; print(qaudit.__file__)"
    done = subprocess.run(
        [machine.bin / "python", "-c", where], cwd=machine.home, check=True, capture_output=True
    )
    assert Path(done.stdout.decode().strip()).is_relative_to(machine.bin.parent)
    out, _ = machine.run("scan", "--help")
    assert "--quick" in out and "--help-all" in out


def test_a_scan_says_price_and_verdict(machine, scanned):
    out, said = scanned
    assert fits(out) and fits(said)
    plan, _, work = said.partition("[1/4]")
    assert "3 checkpoints and 1 soup, 2 schemes and full precision" in plan
    assert re.search(r"^time +\d+ s to \d+ s$", plan, re.M)
    assert "[4/4] soup" in work
    assert re.search(rf"^4 bits +{SUBJECT} {SCHEME} .*SHIP$", out, re.M)
    # Other processors and other Pythons give other last digits.
    assert re.sub(r"\d+(\.\d+)?", "#", out.partition("\nAlong")[0]) == FIRST_SCREEN
    written = {path.name for path in (machine.home / AUDIT).iterdir()}
    assert {"card.md", "report.html", "audit.json", "evidence", "plots"} <= written
    again, said = machine.run(*SCAN)  # which measures nothing
    assert (again, re.search(r"block \d", said)) == (out, None)


def test_the_gate_answers_by_its_code_and_gate_and_pick_in_the_words_of_the_verdict(
    machine, scanned
):
    out, _ = machine.run("gate", AUDIT)
    assert fits(out)
    ships = "SHIP by the policy release: ship soup at gptq-4bit and soup at gptq-3bit."
    assert out.startswith(ships)
    assert "four-bit" in out and "QA0" not in out
    policy = "extends: release\nrules: [{name: four-bit, margin: 0.5%}]\n"
    (machine.home / "ours.yaml").write_text(policy)
    ours, _ = machine.run("gate", AUDIT, "--policy", "ours.yaml", "-q", code=1)
    assert ours.startswith("HOLD by the policy ours: ")
    assert len(ours.splitlines()) == 1
    picked, _ = machine.run("pick", AUDIT, "--bits", "4")
    assert SUBJECT in picked.splitlines()[0] and SCHEME in picked.splitlines()[0]
    _, said = machine.run("gate", "qaudit-out/dmeo", code=2)  # which is mistyped
    assert "`qaudit-out/dmeo`" in said and "hint: " in said


def test_what_ships_is_a_folder_that_says_what_it_is(machine, exported):
    card = (exported / "README.md").read_text(encoding="utf-8")
    assert all(words in card for words in (f"`{SUBJECT}`", SCHEME, "qaudit verify"))
    names = {path.name for path in exported.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not [name for name in names if name.endswith(".jsonl")]  # no data goes along
    _, said = machine.run("export", AUDIT, "--bits", "4", "--out", "demo-w4", code=2)
    assert said.startswith("error: `demo-w4` ")


def test_the_file_is_proven_and_a_changed_one_is_not(machine, exported):
    out, said = machine.run("verify", "demo-w4", "--audit", AUDIT)
    assert fits(out)
    assert "bit for bit" in out and "difference: 0;" in out
    assert out.splitlines()[-1] == "This is what was audited."
    assert "|" not in said  # no progress bars of other libraries
    weights = exported / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    out, _ = machine.run("verify", "demo-w4", "--audit", AUDIT, code=1)
    assert out.splitlines()[-1] == "This is not what was audited."
    weights.write_bytes(whole)


def test_the_audit_is_published_as_one_pull_request(machine, scanned, tmp_path):
    main = tmp_path / "root" / "alice" / "m" / "main"
    main.mkdir(parents=True)
    (main / "README.md").write_text("---\nlicense: mit\n---\n# M\n")
    with Hub(tmp_path / "root", tokens={TOKEN: "bob"}).running() as hub:
        online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        shown, _ = machine.run("publish", AUDIT, "alice/m", "--dry-run", **online)
        assert shown.startswith(f"would open a pull request at {hub.url}/alice/m/discussions\n")
        out, said = machine.run("publish", AUDIT, "alice/m", **online)
        assert out == f"opened: {hub.url}/alice/m/discussions/1\n"
        assert TOKEN not in shown + out + said
        repo = hub.repos["alice/m"]
        files = repo.commits[repo.branches["refs/pr/1"]].files
        readme = files["README.md"].whole().decode()
    assert "# M" in readme
    assert f"**{scanned[0].splitlines()[0]}**" in readme
    assert "qaudit/audit.json" in files


def test_a_page_of_audits_has_the_verdict(machine, scanned):
    out, _ = machine.run("gallery", AUDIT, "--out", "site")
    assert out == "site/index.html\n"
    index = re.sub(r"<[^>]+>", " ", (machine.home / "site" / "index.html").read_text("utf-8"))
    assert re.search(rf"{SUBJECT}\s+{SCHEME}\s+[\d.]+\s+SHIP\s", index)


@pytest.mark.browser
@needs_browser
def test_the_page_shows_the_verdict_and_loads_nothing(machine, scanned, tmp_path):
    with browser(tmp_path / "profile") as driver:
        driver.get((machine.home / AUDIT / "report.html").as_uri())
        verdict = driver.find_element(By.CSS_SELECTOR, ".verdict").text
        rows = driver.find_elements(By.CSS_SELECTOR, "#errors tbody tr")
        pictures = driver.find_elements(By.TAG_NAME, "svg")
        page = " ".join(driver.find_element(By.TAG_NAME, "body").text.split())
        assert [entry["message"] for entry in driver.get_log("browser")] == []
    assert scanned[0].splitlines()[0] in " ".join(verdict.split())
    assert f"4 bits {SUBJECT} {SCHEME}" in page
    assert rows
    assert pictures
