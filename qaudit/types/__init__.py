"""The nouns. Frozen values without torch, all imported from here.

text -> Recipe -> Plan -> (engine) -> Measurement -> AuditRecord -> card
"""

from qaudit.settings import Recipe
from qaudit.types.audit import (
    AuditRecord,
    Further,
    Pass,
    Plan,
    Plugin,
    PluginKind,
    Price,
    Signature,
    Skipped,
    Traffic,
)
from qaudit.types.codes import CODES, Code
from qaudit.types.conclusions import (
    Comparison,
    Finding,
    MeasurementRow,
    Pick,
    Prospect,
    Suggestion,
    TaskRow,
    Worth,
)
from qaudit.types.courses import (
    ChangeRow,
    Course,
    PositionRow,
    RoleRow,
    RolloutRow,
    RoutingRow,
    Span,
    StratumRow,
    Where,
)
from qaudit.types.diagnostics import (
    CurvatureRow,
    Diagnostics,
    GreedyCandidate,
    GreedySearch,
    GreedyTrial,
    Noise,
    NotDiagnosed,
    PlaneRow,
    SensitivityRow,
    ShippedRow,
    WeightRow,
)
from qaudit.types.differences import Changed, Delta, Difference, Reading, TaskDelta
from qaudit.types.evidence import (
    CONFIDENCE_EDGES,
    SURE,
    ByConfidence,
    Evidence,
    Fidelity,
    ImportedAnswers,
    Measurement,
    Positions,
    Roles,
    RolloutEvidence,
    Routing,
    TaskEvidence,
)
from qaudit.types.metrics import METRICS, NEAR_BASELINE, Metric, MetricRecord, Unit, typical_change
from qaudit.types.parts import SILENT, Pins, Resolved, Run, Watch, WorkUnit, units_of, work_of
from qaudit.types.policies import (
    SELECTORS,
    Check,
    CheckStanding,
    ClassVerdict,
    Gate,
    Ignore,
    Level,
    NextStep,
    Policy,
    PolicyRule,
    Status,
    Tolerances,
    Verdict,
)
from qaudit.types.rows import Interval, Row
from qaudit.types.subjects import (
    FULL_PRECISION,
    GREEDY,
    HUB,
    Checkpoint,
    Ref,
    Subject,
    TextFile,
    WeightFile,
    digest,
    reference_in,
)
from qaudit.types.text import (
    ANSWER,
    CALL,
    CHOICES,
    HELD_OUT,
    PROMPT,
    REASONING,
    ROLES,
    SELECTION,
    UNSCORED,
    Choice,
    Corpus,
    Document,
    EvaluationDocument,
    Item,
    Protocol,
    RoleSpan,
    RolloutChoices,
    RolloutText,
    Window,
)
