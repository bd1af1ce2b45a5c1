"""Print the path of the requirements of an installation without torch: `python -m qaudit.light`.

    pip install --no-deps qaudit-llm && pip install --no-deps -r "$(python -m qaudit.light)"

An extra can only add dependencies, so whatever judges or renders a saved audit is installed without
them first and then takes its own from this lock. It is `requirements/judge.lock`, which a wheel
carries inside the package. Only the standard library is imported here: nothing else is there yet.
"""

from pathlib import Path


def lock_file() -> Path:
    package = Path(__file__).resolve().parent
    inside = package / "judge.lock"
    return inside if inside.is_file() else package.parent / "requirements" / "judge.lock"


if __name__ == "__main__":
    print(lock_file())  # noqa: T201 - its output is the whole purpose
