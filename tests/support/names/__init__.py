"""Names of the revisions of public repositories, one file each, in the order of the run.

No test asks the Hub what it holds. These lists stand in for it: a local server answers with
them, families place them, recipes choose from them. Each file's header says which names were
seen in a published source and which follow from a rule, so that no list is taken for more than
it is.
"""

from fnmatch import fnmatchcase
from pathlib import Path

from qaudit.families import find

FOLDER = Path(__file__).parent

# Repositories that are known to be named as another one is.
ALIKE = (
    ("EleutherAI/pythia-*", "EleutherAI/pythia-160m"),
    ("LLM360/CrystalCoder", "LLM360/Crystal"),
    ("allenai/OLMo-7B-0424", "allenai/OLMo-7B-0424-hf"),
    ("allenai/OLMo-1.7-7B*", "allenai/OLMo-7B-0424-hf"),
    (
        "open-sci/open-sci-ref-v0.01-*-1T-4096",
        "open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-4096",
    ),
    ("open-sci/open-sci-ref-v0.01-*-300B-4096", "open-sci/open-sci-ref-v0.01-1.7b-c4-300B-4096"),
)


def file_of(repo):
    """Return the file that holds a repository's names."""
    return FOLDER / f"{repo.replace('/', '--')}.txt"


def recorded():
    """Return every repository with a file of its own."""
    return tuple(sorted(path.stem.replace("--", "/") for path in FOLDER.glob("*.txt")))


def names_of(repo):
    """Return the names of a repository's branches, in the order of the run."""
    path = file_of(repo)
    if not path.is_file():
        path = file_of(next(other for glob, other in ALIKE if fnmatchcase(repo, glob)))
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def family_of(repo):
    family = find(repo)
    assert family is not None, repo
    return family
