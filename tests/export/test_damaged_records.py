"""Whatever the record of an export holds: `verify` ends in words, and trusts no edit of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qaudit.cli.app import run as command
from qaudit.errors import QauditError
from qaudit.export.verify import verify
from qaudit.saved.evidence import VARIABLE, signed_export
from qaudit.saved.exports import FILE, read_export, write_export
from qaudit.types import SILENT
from tests.support.damage import damaged, edited
from tests.support.models import save_model, save_tokenizer, write_documents

KEY = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that was exported, with a signed record."""
    place = tmp_path_factory.mktemp("exported")
    save_tokenizer(save_model(place / "model", 0))
    what = ["--scheme", "rtn-4bit:group=32", "--out", str(place / "new"), "-q"]
    for number, name in enumerate(("calibration", "evaluation")):
        path = write_documents(place / f"{name}.jsonl", range(9 * number, 9 * number + 9))
        what += [f"--{name}", str(path)]
    assert command(["qaudit", "export", str(place / "model"), *what]) == 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(VARIABLE, KEY)
        write_export(signed_export(read_export(place / "new")), place / "new")
    return place / "new"


@given(st.data())
def test_any_record_of_an_export_is_refused_or_has_the_same_value_or_is_not_trusted(
    exported: Path, data: st.DataObject
) -> None:
    path = exported / FILE
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(VARIABLE, KEY)
        assert verify(exported, None, None, None, SILENT).holds is True  # a whole one is trusted
    whole = path.read_bytes()
    record = read_export(exported)
    try:
        if data.draw(st.booleans()):
            path.write_text(json.dumps(damaged(json.loads(whole), data)))
        else:
            path.write_bytes(edited(whole, data))
        with pytest.MonkeyPatch.context() as patched:
            if data.draw(st.booleans()):
                patched.setenv(VARIABLE, KEY)
            result = verify(exported, None, None, None, SILENT)
        assert not result.holds or result.record == record
        assert result.sentence
    except QauditError as error:
        assert error.message
    finally:
        path.write_bytes(whole)
