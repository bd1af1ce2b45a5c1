"""Every way qaudit can refuse or fail, and the exit code each one means.

    QauditError                 a sentence and a hint
    +-- UsageError         2    the request itself is wrong: a name, an option, a recipe
    |   +-- SchemeError    2    a scheme that does not exist or a parameter out of range
    |   +-- RecipeError    2    a recipe with a wrong key or value
    |   +-- PolicyError    2    a policy with a wrong key or value
    |   +-- CorpusError    2    text that cannot be measured on
    |   +-- AuditError     2    a saved audit that is truncated, foreign or from the future
    +-- SourceError        4    a checkpoint that cannot be read: truncated, keys missing, NaN
    |   +-- ModelError     4    a model this engine cannot stream or hold
    |   +-- ConfigurationError 2   a `config.json` or a tokenizer that no library can read
    |   +-- HubError       4    what the Hub refuses or does not have: repo, revision, file, right
    +-- MachineError       4    the machine: memory, disk, device, a missing library
    |   +-- OtherIdentityError 78   a part would measure something else than its plan
    |   +-- UnreachableError 4   the Hub does not answer: no subject can go on, results stay
    +-- TrainingError      4    a training run that cannot go on: its loss is not finite
    +-- MissingParts       3    parts of a plan are not measured yet
    |   +-- UnfinishedError 3   an output folder that has a plan and no audit
    +-- NotShipping        3    the verdict on a class is not SHIP
    +-- Stopped           75    a part was stopped: run it again
    +-- Interrupted      130    stopped by the user; the hint is the way to go on

Messages are one sentence in lower case, names in backticks, no final period; the hint is
what to do, in the user's own words. Only `cli` catches these and turns them into text.
"""

from __future__ import annotations

import errno


class QauditError(Exception):
    """A failure with a sentence, a hint and the exit code of the command line."""

    code = 4

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(QauditError):
    """The request is wrong."""

    code = 2


class SchemeError(UsageError):
    """A scheme does not exist, or a parameter of it is out of range."""


class RecipeError(UsageError):
    """A recipe has a wrong key or value."""


class PolicyError(UsageError):
    """A policy has a wrong key or value."""


class CorpusError(UsageError):
    """The text cannot be measured on."""


class AuditError(UsageError):
    """A saved audit cannot be read."""


class SourceError(QauditError):
    """A checkpoint cannot be read."""


class ModelError(SourceError):
    """A model cannot be run block by block, nor held whole."""


class ConfigurationError(SourceError):
    """The configuration or the tokenizer of a checkpoint cannot be read."""

    code = 2


class HubError(SourceError):
    """The Hub refuses something, or does not have it."""


class MachineError(QauditError):
    """The machine lacks memory, disk, a device or a library."""


class OtherIdentityError(MachineError):
    """A part would measure something else than its plan, or on a device that computes wrongly."""

    code = 78


class UnreachableError(MachineError):
    """The Hub does not answer after several tries."""


class TrainingError(QauditError):
    """A training run cannot go on; its last good checkpoint stays on disk."""


class Stopped(QauditError):
    """A part was asked to end; it goes on where it stopped when it is run again."""

    code = 75


class MissingParts(QauditError):
    """Parts of a plan are not measured yet."""

    code = 3


class UnfinishedError(MissingParts):
    """A scan was interrupted before its audit was written."""


class NotShipping(QauditError):
    """The verdict on what is to be exported is not SHIP."""

    code = 3


class Interrupted(QauditError):
    """The user stopped the work; what was measured stays on disk."""

    code = 130


def not_written(path: object, error: OSError | UnicodeEncodeError) -> MachineError:
    """Make the error for a file that the machine did not take."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MachineError(
            f"no space left on device while writing `{path}`",
            hint="free some space and run the same command again: it goes on from here",
        )
    reason = getattr(error, "strerror", None) or str(error)
    return MachineError(
        f"`{path}` cannot be written: {reason.lower()}",
        hint="fix that or give another folder with `--out`, then run the same command again",
    )


_OUT_OF_MEMORY = (
    "can't allocate memory",  # torch on a CPU
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",  # pinned memory of the host
    "HIP error: out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed; libraries beside torch's allocator have no type."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or any(text in str(error) for text in _OUT_OF_MEMORY)
