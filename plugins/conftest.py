"""The fixtures of tests/."""

from tests.conftest import *  # noqa: F403
