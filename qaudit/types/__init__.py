"""The nouns. Frozen values without torch, in the order in which the sentence uses them.

text -> Recipe -> Plan -> (engine) -> Measurement -> Audit -> card
"""

from qaudit.settings import Recipe
from qaudit.types.audit import Audit
from qaudit.types.curved import CurvatureRow, PlaneRow
from qaudit.types.diagnosed import NotDiagnosed, SensitivityRow, WeightRow
from qaudit.types.experimented import (
    Claim,
    Contrast,
    ContrastResult,
    ExperimentSummary,
    SeedEstimate,
    SeedPoint,
    Standing,
)
from qaudit.types.gated import Check, Gate, Ignore, Level, Metric, Policy, PolicyRule
from qaudit.types.judged import (
    Comparison,
    Departure,
    Finding,
    Interval,
    MeasurementRow,
    Noise,
    Pick,
    PooledRow,
    Race,
    RaceCost,
    Round,
    TaskRow,
)
from qaudit.types.measured import Evidence, Measurement, Skipped
from qaudit.types.planned import Plan, Traffic
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
    "Claim",
    "Comparison",
    "Contrast",
    "ContrastResult",
    "Corpus",
    "CurvatureRow",
    "Departure",
    "Document",
    "EvaluationDocument",
    "Evidence",
    "ExperimentSummary",
    "Finding",
    "Gate",
    "Ignore",
    "Interval",
    "Level",
    "Measurement",
    "MeasurementRow",
    "Metric",
    "Noise",
    "NotDiagnosed",
    "Pick",
    "Plan",
    "PlaneRow",
    "Policy",
    "PolicyRule",
    "PooledRow",
    "Protocol",
    "Race",
    "RaceCost",
    "Recipe",
    "Ref",
    "Round",
    "SeedEstimate",
    "SeedPoint",
    "SensitivityRow",
    "Skipped",
    "Standing",
    "Subject",
    "TaskRow",
    "TextFile",
    "Traffic",
    "WeightFile",
    "WeightRow",
    "Window",
    "digest",
]
