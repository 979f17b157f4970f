"""The settings of all tests (hypothesis, threads), for those that are not below tests/."""

from tests.conftest import *  # noqa: F403
