"""The nouns. Frozen values without torch, all imported from here.

text -> Recipe -> Plan -> (engine) -> Measurement -> AuditRecord -> card
"""

from qaudit.settings import Recipe
from qaudit.types.audit import *
from qaudit.types.conclusions import *
from qaudit.types.evidence import *
from qaudit.types.metrics import *
from qaudit.types.rows import *
from qaudit.types.subjects import *
