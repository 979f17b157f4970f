"""``powergrad run``: runs an unmodified training program with altered gradients.

:func:`launch` executes a :class:`Program` with :class:`Options`. It needs only torch.
"""

from powergrad.run.launching import NOT_ALTERED, launch
from powergrad.run.options import Options
from powergrad.run.program import Program

__all__ = ["NOT_ALTERED", "Options", "Program", "launch"]
