import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.core.statistics import BINS, counts_of
from qaudit.saved.results import Identity, ResultStore, read_measurement, read_sealed, write_sealed
from qaudit.types import (
    ByConfidence,
    Evidence,
    Fidelity,
    Measurement,
    Positions,
    Roles,
    RolloutEvidence,
)  # fmt: skip
from qaudit.whole import remove_stale
from tests.support.items import items_of

IDENTITY = Identity(
    subject="weights", model="config", scheme="rtn:bits=4", scheme_version=1, corpus="corpus",
    geometry="context=8,batch=8", dtype="torch.float32", device="cpu", numerics=1,
    libraries="libraries",
)  # fmt: skip


def measurement(subject="a", **changes):
    evidence = Evidence(
        document_sha256=("x" * 64, "y" * 64), nll_sum=np.array([1.5, 2.5]),
        tokens=np.array([3, 4]), nbytes=np.array([10, 20]), **changes,
    )  # fmt: skip
    return Measurement(
        subject, "rtn-4bit", "rtn:bits=4", evidence, 4.125, 0.5, 7, ("a note",), {"f": "0" * 64}
    )


def compared():
    """Return the sums of two documents of 3 and 4 tokens."""
    kl_N, document_N = np.array([0.1, 0.2, 0.3, 0, 0, 0.5, 1e-3]), np.array([0, 0, 0, 1, 1, 1, 1])
    edges = np.array([0, 16, 20])
    tokens = np.array([[3, 0], [2, 2]])
    sums = np.array([[0.6, 0.0], [0.5, 0.001]])
    fidelity = Fidelity(
        kl_sum=sums.sum(1), kl_max=np.array([0.3, 0.5]), kl_counts=counts_of(kl_N, document_N, 2),
        same_top=np.array([3, 2]), squared_dp_sum=np.array([0.25, 0.5]),
        by_confidence=ByConfidence(
            np.array([[1, 0, 2, 0], [0, 3, 0, 1]]),
            np.array([[0.1, 0, 0.5, 0], [0, 0.5, 0, 0.001]]),
            np.array([[0, 0, 0, 0], [0, 1, 0, 1]]),
        ),
    )  # fmt: skip
    positions = Positions(edges, tokens, np.array([[1.5, 0.0], [1.0, 1.5]]), sums)
    return {"fidelity": fidelity, "positions": positions}


def by_role(**changes):
    tokens, losses = np.array([[1, 2], [4, 0]]), np.array([[0.5, 1.0], [2.5, 0.0]])
    return Roles(**{"names": ("call", "answer"), "tokens": tokens, "nll_sum": losses, **changes})


def written(**changes):
    values = {
        "sha256": "hash", "prompt": np.array([0, 0, 1]), "tokens": np.array([4, 2, 4]),
        "nll_sum": np.array([1.0, 0.5, 2.0]), "agreed": np.array([4, -1, 1]),
        "end_names": ("turn",), "end_sum": np.array([[0.9], [0.8], [1.1]]),
        "kl_sum": np.array([0.0, 0.1, 0.2]),
    }  # fmt: skip
    return RolloutEvidence(**{**values, **changes})


def in_bins(**changes):
    """Return the sums of `written` by position behind the prompt."""
    values = {
        "edges": np.array([0, 3, 9]), "tokens": np.array([[3, 1], [2, 0], [3, 1]]),
        "nll_sum": np.array([[0.5, 0.5], [0.5, 0.0], [1.0, 1.0]]),
        "kl_sum": np.array([[0.0, 0.0], [0.1, 0.0], [0.1, 0.1]]),
        "end_sum": np.full((3, 2, 1), 0.4),
    }  # fmt: skip
    return Positions(**{**values, **changes})


def by_role_of_samples(**changes):
    values = vars(in_bins()) | {"names": ("reasoning", "answer")} | changes
    return Roles(**{name: value for name, value in values.items() if name != "edges"})


MARKS = np.array([np.nan, 1, 0.5])
FULL_PRECISION = dataclasses.replace(compared()["positions"], kl_sum=None)


def plain(value):
    """Return dataclasses as dictionaries, whose arrays numpy compares."""
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {name: plain(part) for name, part in vars(value).items()}


def test_a_measurement_comes_back_as_it_was_written(tmp_path):
    for parts in (
        {},
        {"tasks": (items_of(np.array([1.0, 2, 4, 3]), options=2, answer=1, task="piqa"),)},
        compared(),
        {"fidelity": compared()["fidelity"]},
        {"positions": FULL_PRECISION},
        {"roles": by_role()},
        {"fidelity": compared()["fidelity"],
         "roles": by_role(kl_sum=np.array([[0.2, 0.4], [0.501, 0.0]]))},
        {"rollouts": written()},
        {"rollouts": written(positions=in_bins())},
        {"rollouts": written(kl_sum=None, roles=by_role_of_samples(kl_sum=None))},
        {"rollouts": written(end_names=(), end_sum=np.zeros((3, 0)))},
        {"rollouts": written(mark=MARKS, drawn_sum=np.array([-np.inf, -2.5, 0.0]))},
        {"rollouts": written(drawn_sum=np.zeros(3), entropy_sum=np.array([0.0, 2.5, 1.0]))},
        {"rollouts": written(mark=MARKS, weights_sha256="cc", unweighed="why")},
    ):  # fmt: skip
        store = ResultStore(tmp_path / "evidence")
        path = store.write(measurement(**parts), IDENTITY.key).path
        found = store.find("a", "rtn-4bit", IDENTITY.key)
        assert found is not None
        np.testing.assert_equal(plain(found.measurement), plain(measurement(**parts)))
        with pytest.raises(ValueError, match="it has another hash"):
            read_measurement(path, "0" * 64)
    task = items_of(np.array([1.0, 2.0, 4.0, 3.0]), options=2, answer=1, task="piqa")
    for right, answers in ((task.right, [1, 1]), (np.ones(4, bool), [0, 0])):
        several = dataclasses.replace(task, right=right)
        path = ResultStore(tmp_path).write(measurement(tasks=(several,)), "k").path
        with np.load(path) as arrays:
            assert arrays["choice_answers"].tolist() == answers


def test_roles_and_rollouts_that_cannot_be_are_damage(tmp_path):
    for kind, changes in (
        ("roles", {"names": ("call", "call")}),
        ("roles", {"names": ("call",)}),
        ("roles", {"tokens": np.array([[2, 2], [4, 0]])}),
        ("roles", {"nll_sum": np.array([[0.5], [2.5]])}),
        ("rollouts", {"agreed": np.array([5, -1, 1])}),
        ("rollouts", {"agreed": np.array([4, -2, 1])}),
        ("rollouts", {"tokens": np.array([4, 2])}),
        ("rollouts", {"kl_sum": np.array([0.0, -0.1, 0.2])}),
        ("rollouts", {"end_sum": np.array([[0.9]])}),
        ("rollouts", {"positions": in_bins(end_sum=None)}),
        ("rollouts", {"positions": in_bins(end_sum=np.zeros((3, 2, 2)))}),
        ("rollouts", {"roles": by_role_of_samples(tokens=np.ones((3, 2), dtype=int))}),
        ("rollouts", {"end_sum": np.full((3, 1), np.nan)}),
        ("rollouts", {"mark": np.array([np.inf, 1, 0])}),
        ("rollouts", {"mark": np.array([1.0, 0.0])}),
        ("rollouts", {"drawn_sum": np.array([np.nan, -1, -1])}),
        ("rollouts", {"drawn_sum": np.array([0.5, -1, -1])}),
        ("rollouts", {"entropy_sum": np.array([1.0, -1, 1])}),
    ):
        part = {"roles": by_role, "rollouts": written}[kind](**changes)
        path = ResultStore(tmp_path).write(measurement(**{kind: part}), IDENTITY.key).path
        with pytest.raises(ValueError, match=f"`{kind.removesuffix('s')}_"):
            read_measurement(path)


def test_a_hit_needs_everything_that_changes_numbers_to_be_equal_but_the_label(tmp_path):
    store = ResultStore(tmp_path)
    path = store.write(measurement("a"), IDENTITY.key).path
    assert store.find("b", "rtn-4bit", IDENTITY.key).measurement.subject == "b"
    for field in dataclasses.fields(Identity):
        value = getattr(IDENTITY, field.name)
        other = dataclasses.replace(IDENTITY, **{field.name: value + type(value)(1)})
        assert store.find("a", "rtn-4bit", other.key) is None, field.name
    whole, other = path.read_bytes(), dataclasses.replace(IDENTITY, subject="other weights").key
    for damage in (b"", b"not a zip", whole[:-40]):
        path.write_bytes(damage)
        assert store.find("a", "rtn-4bit", IDENTITY.key) is None
    path.write_bytes(whole)
    path.rename(store.path("a--rtn-4bit", other))  # the name of another model collides
    assert store.find("a", "rtn-4bit", other) is None


@given(st.data())
def test_a_damaged_file_is_absent_or_what_it_was_and_never_an_error(data):
    with tempfile.TemporaryDirectory() as folder:
        path = ResultStore(Path(folder)).write(measurement(), IDENTITY.key).path
        whole = path.read_bytes()
        places = st.integers(0, len(whole) - 1)
        content = bytearray(whole[: data.draw(places)] if data.draw(st.booleans()) else whole)
        for place in data.draw(st.lists(places, max_size=4)):
            if place < len(content):
                content[place] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        found = ResultStore(Path(folder)).find("a", "rtn-4bit", IDENTITY.key)
        assert found is None or plain(found.measurement)["evidence"]["tokens"].tolist() == [3, 4]


def swapped(path, **columns):
    with np.load(path) as arrays:
        every = {name: arrays[name] for name in arrays.files} | columns
    np.savez_compressed(path, **{name: one for name, one in every.items() if one is not None})


COUNTS = np.zeros((2, BINS), dtype=np.uint8)
PLAIN = [
    ({"nll_sum": np.array([0.75, 1.25])}, "it is not as it was written"),
    ({"nll_sum": np.array(["1.0", "2.0"])}, "`nll_sum` is no column of such values"),
    ({"nll_sum": np.array([1j, 2j])}, "`nll_sum` is no column"),
    ({"nll_sum": np.array(1.0)}, "`nll_sum` is no column"),
    ({"tokens": np.array([1.5, 2.5])}, "`tokens` is no column"),
    ({"bytes": np.array([1, -1])}, "`bytes` are below zero"),
    ({"strata": np.array(["one"])}, "`strata` is no column"),
    ({"bytes": None}, "it lacks `bytes`"),
    ({"calibration_seed": np.array([1, 2])}, "it is damaged"),
    ({"about": np.array("[1]")}, "`about` is `[1]`"),
    ({"about": np.array("{}")}, "`about.key` is missing"),
    ({"about": np.array("{")}, "property name"),
    ({"choice_nll": np.ones(3), "choice_items": np.arange(3), "choice_answers": np.arange(9)},
     "it lacks `choice_task`"),
]  # fmt: skip
COMPARED = [
    ({"kl_sum": None}, "it lacks `kl_sum`"),
    ({"position_edges": None}, "it lacks `position_edges`"),
    ({"position_kl_sum": None}, "position_kl_sum"),
    ({"kl_sum": np.array([0.1, np.nan])}, "`kl_sum` is not finite, or below zero"),
    ({"kl_sum": np.array([0.1, -1e-9])}, "`kl_sum` is not finite, or below zero"),
    ({"kl_sum": np.ones(3)}, "`kl_sum` is no column of such values"),
    ({"kl_max": np.array(["a", "b"])}, "`kl_max` is no column of such values"),
    ({"kl_max": np.array([np.inf, 1.0])}, "`kl_max` is not finite, or below zero"),
    ({"squared_dp_sum": np.ones((2, 2))}, "`squared_dp_sum` is no column of such values"),
    ({"kl_counts": COUNTS}, "`kl_counts` are not of its tokens"),
    ({"kl_counts": COUNTS[:, :5]}, "`kl_counts` is no column of such values"),
    ({"kl_counts": COUNTS.astype(float)}, "`kl_counts` is no column of such values"),
    ({"kl_counts": COUNTS.astype(np.int8) - 1}, "`kl_counts` are below zero"),
    ({"same_top": np.array([4, 0])}, "`same_top` are more than its tokens"),
    ({"same_top": np.array([-1, 0])}, "`same_top` are below zero"),
    ({"position_edges": np.array([0])}, "`position_"),
    ({"position_edges": np.arange(100)}, "`position_"),
    ({"position_edges": np.array([1, 16, 20])}, "`position_edges` are no bins"),
    ({"position_edges": np.array([0, 16, 16])}, "`position_edges` are no bins"),
    ({"position_tokens": np.array([[1, 0], [2, 2]])}, "`position_tokens` are not"),
    ({"position_nll_sum": np.ones(2)}, "`position_nll_sum` is no column of such values"),
    ({"position_kl_sum": -np.ones((2, 2))}, "`position_kl_sum` is not finite, or below"),
]  # fmt: skip


@pytest.mark.property
@pytest.mark.parametrize(
    ("has_fidelity", "columns", "said"),
    [*((False, *row) for row in PLAIN), *((True, *row) for row in COMPARED)],
    ids=range(len(PLAIN) + len(COMPARED)),
)
def test_columns_that_statistics_cannot_take_are_refused(tmp_path, has_fidelity, columns, said):
    parts = compared() if has_fidelity else {}
    path = ResultStore(tmp_path).write(measurement(**parts), IDENTITY.key).path
    read_measurement(path)
    swapped(path, **columns)
    with pytest.raises(ValueError) as refused:
        read_measurement(path)
    assert said in str(refused.value)
    assert ResultStore(tmp_path).find("a", "rtn-4bit", IDENTITY.key) is None


def test_what_was_edited_is_of_no_identity_or_a_flood_is_not_read(tmp_path, monkeypatch):
    store, other = ResultStore(tmp_path), dataclasses.replace(IDENTITY, subject="other")
    path = store.write(measurement(), IDENTITY.key, other).path
    with pytest.raises(ValueError, match="not that of its key"):
        read_measurement(path)
    path.unlink()
    os.mkfifo(path)  # under the name of evidence; it is not waited for
    assert store.find("a", "rtn-4bit", IDENTITY.key) is None
    with pytest.raises(OSError, match="not a regular file"):
        read_measurement(path)
    rows = tmp_path / "rows" / "a.json"
    write_sealed(rows, '{"a": 1}')
    assert read_sealed(rows) == {"a": 1}
    for text in ('{"a": 2}', '{"a": 2, "sha256": ""}', "[]"):
        rows.write_text(text)
        with pytest.raises(ValueError, match="not as it was written"):
            read_sealed(rows)
    path.unlink()
    path = ResultStore(tmp_path).write(measurement(), IDENTITY.key).path
    swapped(path, nll_sum=np.zeros(10**6))
    monkeypatch.setattr("qaudit.saved.results.LARGEST_NBYTES", 10**6)
    monkeypatch.setattr(np, "load", None)
    with pytest.raises(ValueError, match="unpacks to more"):
        read_measurement(path)


def test_a_kill_while_writing_leaves_nothing_that_looks_whole(tmp_path):
    script = f"""if True:
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
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    (half,) = tmp_path.glob("*.partial")
    os.utime(half, (0, 0))  # long ago
    living = tmp_path / "b--rtn-4bit--0123.n7-0123456789abcdef.partial"
    living.touch()  # another host, where no process of this one is known, is still writing it
    assert ResultStore(tmp_path).find("a", "rtn-4bit", IDENTITY.key) is None
    remove_stale(tmp_path)
    assert (half.exists(), living.exists()) == (False, True)
    ResultStore(tmp_path).write(measurement(), IDENTITY.key)
    assert ResultStore(tmp_path).find("a", "rtn-4bit", IDENTITY.key) is not None
