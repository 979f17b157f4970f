"""Fixtures of the tests of studies."""

from studies import in_process, made_up

__all__ = ["in_process", "made_up"]
