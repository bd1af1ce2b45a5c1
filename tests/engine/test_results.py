import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from qaudit.engine.results import Identity, ResultStore, read_measurement
from qaudit.types import Evidence, Measurement

IDENTITY = Identity(
    subject="weights",
    model="config",
    scheme="rtn:bits=4",
    scheme_version=1,
    corpus="corpus",
    geometry="context=8,batch=8",
    checks="",
    dtype="torch.float32",
    device="cpu",
    numerics=1,
    libraries="libraries",
)


def measurement(subject="a", **changes):
    evidence = Evidence(
        document_sha256=("x" * 64, "y" * 64),
        nll_sum=np.array([1.5, 2.5]),
        tokens=np.array([3, 4]),
        nbytes=np.array([10, 20]),
        split=("evaluation", "evaluation"),
        **changes,
    )
    return Measurement(subject, "rtn-4bit", "rtn:bits=4", evidence, 4.125, 0.5, 7, ("a note",))


def same(a, b):
    arrays = ("nll_sum", "tokens", "nbytes")
    return all(np.array_equal(getattr(a.evidence, n), getattr(b.evidence, n)) for n in arrays) and {
        **vars(a),
        "evidence": None,
    } == {**vars(b), "evidence": None}


def test_a_measurement_comes_back_as_it_was_written(tmp_path):
    store = ResultStore(tmp_path / "evidence")
    path = store.write(measurement(), IDENTITY.key).path
    found = store.find("a", "rtn-4bit", IDENTITY.key)
    assert found is not None
    assert same(found.measurement, measurement())
    assert read_measurement(path).evidence.document_sha256 == ("x" * 64, "y" * 64)


def test_scored_choices_travel_with_the_evidence(tmp_path):
    store = ResultStore(tmp_path)
    choices = {
        "choice_nll": np.array([1.0, 2.0]),
        "choice_items": np.array([0, 0]),
        "choice_answers": np.array([1]),
    }
    store.write(measurement(**choices), IDENTITY.key)
    found = store.find("a", "rtn-4bit", IDENTITY.key)
    assert found.measurement.evidence.choice_answers.tolist() == [1]


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Identity)])
def test_a_hit_needs_everything_that_changes_numbers_to_be_equal(tmp_path, field):
    store = ResultStore(tmp_path)
    store.write(measurement(), IDENTITY.key)
    value = getattr(IDENTITY, field)
    other = dataclasses.replace(IDENTITY, **{field: value + type(value)(1)})
    assert store.find("a", "rtn-4bit", other.key) is None


def test_a_file_under_a_colliding_name_but_for_another_model_is_not_a_hit(tmp_path):
    store = ResultStore(tmp_path)
    path = store.write(measurement(), IDENTITY.key).path
    other = dataclasses.replace(IDENTITY, subject="other weights").key
    path.rename(store.path("a--rtn-4bit", other))
    assert store.find("a", "rtn-4bit", other) is None


def test_the_same_weights_under_another_label_are_measured_once(tmp_path):
    store = ResultStore(tmp_path)
    store.write(measurement("a"), IDENTITY.key)
    assert store.find("b", "rtn-4bit", IDENTITY.key).measurement.subject == "b"


@pytest.mark.parametrize("damage", [b"", b"not a zip", None])
def test_a_damaged_file_is_as_good_as_absent(tmp_path, damage):
    store = ResultStore(tmp_path)
    path = store.write(measurement(), IDENTITY.key).path
    path.write_bytes(path.read_bytes()[:-40] if damage is None else damage)
    assert store.find("a", "rtn-4bit", IDENTITY.key) is None


def test_a_kill_while_writing_leaves_nothing_that_looks_whole(tmp_path):
    script = textwrap.dedent(
        f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import numpy as np
        from test_results import IDENTITY, ResultStore, measurement
        from pathlib import Path
        savez = np.savez_compressed
        def half(file, **arrays):
            savez(file, **arrays); file.flush()
            file.truncate(file.tell() // 2); os.kill(os.getpid(), signal.SIGKILL)
        np.savez_compressed = half
        ResultStore(Path({str(tmp_path)!r})).write(measurement(), IDENTITY.key)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    (half,) = tmp_path.iterdir()
    living = tmp_path / f"b--rtn-4bit--0123.{os.getpid()}.partial"
    living.touch()  # somebody is still writing it
    assert ResultStore(tmp_path).find("a", "rtn-4bit", IDENTITY.key) is None
    ResultStore(tmp_path).remove_what_the_dead_left()
    assert (half.exists(), living.exists()) == (False, True)
    ResultStore(tmp_path).write(measurement(), IDENTITY.key)
    assert ResultStore(tmp_path).find("a", "rtn-4bit", IDENTITY.key) is not None
