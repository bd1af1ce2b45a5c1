"""The nouns. Frozen values without torch, in the order in which the sentence uses them.

text -> Recipe -> Plan -> (engine) -> Measurement -> Audit -> card
"""

from qaudit.types.audit import Audit
from qaudit.types.diagnosed import NotDiagnosed, SensitivityRow, WeightRow
from qaudit.types.gated import Check, Gate, Ignore, Level, Metric, Policy, PolicyRule
from qaudit.types.judged import (
    Comparison,
    Departure,
    Finding,
    Interval,
    Noise,
    Pick,
    PooledScore,
    Race,
    RaceCost,
    Round,
    Score,
    TaskScore,
)
from qaudit.types.measured import Evidence, Measurement, Skipped
from qaudit.types.planned import Plan, Recipe, Traffic
from qaudit.types.subjects import (
    FULL_PRECISION,
    GREEDY,
    RELEASED,
    Checkpoint,
    Ref,
    Subject,
    WeightFile,
    digest,
)
from qaudit.types.text import (
    HELD_OUT,
    SELECTION,
    Choice,
    Corpus,
    Document,
    EvaluationDocument,
    Protocol,
    TextFile,
    Window,
)

__all__ = [
    "FULL_PRECISION",
    "GREEDY",
    "HELD_OUT",
    "RELEASED",
    "SELECTION",
    "Audit",
    "Check",
    "Checkpoint",
    "Choice",
    "Comparison",
    "Corpus",
    "Departure",
    "Document",
    "EvaluationDocument",
    "Evidence",
    "Finding",
    "Gate",
    "Ignore",
    "Interval",
    "Level",
    "Measurement",
    "Metric",
    "Noise",
    "NotDiagnosed",
    "Pick",
    "Plan",
    "Policy",
    "PolicyRule",
    "PooledScore",
    "Protocol",
    "Race",
    "RaceCost",
    "Recipe",
    "Ref",
    "Round",
    "Score",
    "SensitivityRow",
    "Skipped",
    "Subject",
    "TaskScore",
    "TextFile",
    "Traffic",
    "WeightFile",
    "WeightRow",
    "Window",
    "digest",
]
