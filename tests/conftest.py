"""What holds for every test: one thread, no network, no settings of the person who runs it."""

import functools
import gc
import itertools
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

# Before anything imports torch: results must not depend on how many cores are at hand, and
# several workers share them.
os.environ["OMP_NUM_THREADS"] = os.environ.get("QAUDIT_TEST_THREADS", "1")
os.environ["MKL_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_TOKEN_PATH"] = os.devnull  # no token goes to a server of a test
os.environ["MPLBACKEND"] = "Agg"

import pytest
from hypothesis import settings

# Processes that tests start read compiled modules, and so does the next run.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
gc.disable()  # until tests are collected: libraries and tests are no garbage

pytest_plugins = ["tests.support.hub"]

# A core that others use is no finding; `make fuzz` gives the inputs that are saved here.
settings.register_profile("busy", deadline=None, max_examples=30)
settings.register_profile("fuzz", deadline=None, max_examples=4000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "busy"))

FREE_NBYTES = 16 * 2**30

CACHES = itertools.count()
INPUTS = [0]  # generated for property tests, in this process and in finished workers


def pytest_itemcollected(item):
    """Mark property tests, and count the inputs that they are given."""
    test = getattr(item, "obj", None)
    if not getattr(test, "is_hypothesis_test", False):
        return
    item.add_marker("property")
    inner = test.hypothesis.inner_test
    if hasattr(inner, "counted"):
        return

    @functools.wraps(inner)
    def counted(*arguments, **named):
        INPUTS[0] += 1
        return inner(*arguments, **named)

    counted.counted = True  # type: ignore[attr-defined]
    test.hypothesis.inner_test = counted


def pytest_collection_finish():
    """Take libraries and collected tests out of every later search for garbage."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # what a test leaves is small, what it loaded is large
    gc.enable()


def pytest_sessionfinish(session):
    """Hand a worker's count to the process that prints it."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["inputs"] = INPUTS[0]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Add the count of a worker that ended."""
    INPUTS[0] += getattr(node, "workeroutput", {}).get("inputs", 0)


@pytest.fixture(autouse=True, scope="session")
def _no_settings_from_outside(tmp_path_factory):
    """Pin what is free, too: plans and routes depend on it, and other processes take some."""
    with pytest.MonkeyPatch.context() as patched:
        for name in list(os.environ):
            if name.startswith("QAUDIT_"):
                patched.delenv(name)
        with suppress(ImportError):  # the environment of the kernels' tests has none
            import psutil

            memory = psutil.virtual_memory()._replace(available=FREE_NBYTES)
            patched.setattr(psutil, "virtual_memory", lambda: memory)
            no_cgroups = tmp_path_factory.getbasetemp() / "no-cgroups"
            patched.setattr("qaudit.host.CGROUPS", no_cgroups)
        yield


@pytest.fixture(autouse=True)
def _named_cache(tmp_path_factory):
    """Name a cache for each test, made if it is used."""
    cache = tmp_path_factory.getbasetemp() / f"qaudit-cache-{next(CACHES)}"
    os.environ["QAUDIT_CACHE"] = str(cache)


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Return what has a function write into a folder of its own, once; tests only read it."""

    @functools.cache
    def call(function, *arguments, **named):
        return function(tmp_path_factory.mktemp("once"), *arguments, **named)

    return call


@pytest.fixture(scope="session")
def wheel_file(tmp_path_factory):
    """Return the wheel that a release would publish: compressing the demo takes seconds."""
    from hatchling.builders.wheel import WheelBuilder

    from tests.house.source import ROOT

    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(built)


@pytest.fixture
def qaudit(monkeypatch, capsys):
    """Return a function that runs the command line in this process, and may expect its code."""

    from qaudit.cli import main
    from tests.support.cli import Outcome

    def run(*arguments, code=None):
        monkeypatch.setattr(sys, "argv", ["qaudit", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        shown = capsys.readouterr()
        end = left.value.code
        assert "Traceback" not in shown.err + shown.out
        done = Outcome(end if isinstance(end, int) else int(bool(end)), shown.out, shown.err)
        assert code in (None, done.code), done.err
        return done

    return run


@pytest.fixture
def without_pictures(monkeypatch):
    """Draw nothing: pictures are two thirds of a tiny scan's time."""
    from tests.support.saved_audits import stub_pictures

    monkeypatch.setattr("qaudit.report.folder.write", stub_pictures)


@pytest.fixture
def online(tmp_path, monkeypatch):
    """Return a home folder with a network, no token and empty caches."""
    from qaudit.hub.api import Client
    from qaudit.hub.fetch import Fetcher

    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("QAUDIT_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    for waits in (Client.__init__, Fetcher.__init__):
        monkeypatch.setitem(waits.__kwdefaults__, "pause", lambda seconds: None)
    return tmp_path


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{INPUTS[0]:,} inputs were generated for property tests")
