"""``powergrad run``: runs an unmodified program with altered gradients. It needs only torch."""

from powergrad.run.launching import launch
from powergrad.run.program import Options, Program

__all__ = ["Options", "Program", "launch"]
