"""Sign an audit and its evidence with a shared key, and check that: what hashes cannot promise.

A hash finds damage. An editor who renews it is found by a signature alone: HMAC-SHA256, by the
key in `QAUDIT_SIGNING_KEY`, of the canonical form of `audit.json` and of the hash of every file
that its measurements and tasks name, which is all that is judged. The record of a signed
audit's export is signed too. The key is read from the environment, and is never printed or saved.
A holder of the key can sign anything.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from qaudit.errors import AuditError, SourceError, UsageError
from qaudit.saved.audits import from_json, to_json
from qaudit.saved.codec import EDITED, FILE, encode, read_object, text_of
from qaudit.saved.evidence import read_saved
from qaudit.saved.exports import ExportRecord, export_document
from qaudit.saved.results import sha256_of
from qaudit.types import AuditRecord, Signature, digest
from qaudit.whole import write_whole

VARIABLE = "QAUDIT_SIGNING_KEY"
METHOD = "hmac-sha256"
SHORTEST = 32
"""Characters of a key: published signatures can be tried against guesses."""


def signing_key(option: str) -> bytes:
    """Return the key of the environment, or refuse one that is missing or easy to guess."""
    key = os.environ.get(VARIABLE, "")
    if len(key) < SHORTEST:
        state = f"has {len(key)} characters" if key else "is not set"
        raise UsageError(
            f"`{option}` needs a key of {SHORTEST} characters or more, and `{VARIABLE}` {state}",
            hint=f"make one: `export {VARIABLE}=$(openssl rand -hex 32)`, and keep it secret",
        )
    return key.encode()


def sign_audit(folder: Path) -> AuditRecord:
    """Write the signature of an audit into its `audit.json`, and return the audit."""
    key = signing_key("--set sign=true")
    document = read_object(folder / FILE, f"`{folder / FILE}`", EDITED)
    read_saved(folder)  # refuses evidence that is of something else
    value = _signature(document, folder, key)
    text = text_of({**document, "signature": {"method": METHOD, "value": value}})
    write_whole(folder / FILE, text)
    return from_json(text)


def must_be_signed(audit: AuditRecord, folder: Path, option: str = "--signed") -> None:
    """Refuse an audit that is not signed with the key of the environment, as it is now."""
    key = signing_key(option)
    document = read_object(folder / FILE, f"`{folder / FILE}`", EDITED)
    if audit.signature is None:
        raise AuditError(
            f"`{folder}` is not signed",
            hint=f"scan it again with `--set sign=true`, and `{VARIABLE}` set",
        )
    read_saved(folder)
    value = _signature(document, folder, key)
    same = to_json(from_json(text_of(document))) == to_json(audit)
    is_known = audit.signature.method == METHOD
    if not (same and is_known and hmac.compare_digest(value, audit.signature.value)):
        raise AuditError(
            f"the signature of `{folder}` is not of this key and these files",
            hint=f"it was edited after it was signed, or `{VARIABLE}` is another key",
        )


def has_key() -> bool:
    """Return whether the environment has a key, of any length."""
    return bool(os.environ.get(VARIABLE))


def may_sign(audit: AuditRecord | None, folder: Path) -> bool:
    """Return whether an export is to be signed; refuse a signed audit that was edited since."""
    if audit is None or audit.signature is None or not has_key():
        return False
    must_be_signed(audit, folder, "export")
    return True


def signed_export(record: ExportRecord) -> ExportRecord:
    value = _value(encode(record), signing_key("export"), "export")
    return replace(record, signature=Signature(METHOD, value))


def is_signed_export(record: ExportRecord, folder: Path) -> bool:
    """Return whether the record of an exported folder is signed with the environment's key."""
    if record.signature is None or record.signature.method != METHOD:
        return False
    value = _value(export_document(folder), signing_key("verify"), "export")
    return hmac.compare_digest(value, record.signature.value)


def _signature(document: dict[str, Any], folder: Path, key: bytes) -> str:
    files = {}
    for name in sorted({*_files_in(document)}):
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise AuditError(f"`{name}` is outside the audit `{folder}`", hint=EDITED)
        if not path.is_file():
            raise SourceError(f"there is no `{path}`, which the audit names", hint=EDITED)
        files[name] = sha256_of(path)
    return _value(document, key, files=files)


def _value(document: dict[str, Any], key: bytes, *before: str, **behind: Any) -> str:
    """Return the keyed hash of a document without its signature, and of what belongs to it."""
    body = {name: value for name, value in document.items() if name != "signature"}
    signed = [METHOD, *before, body, *behind.values()]
    return hmac.digest(key, digest(signed).encode(), "sha256").hex()


def _files_in(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for part in value:
            yield from _files_in(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name == "evidence" and isinstance(part, str) and part:
                yield part
            else:
                yield from _files_in(part)
