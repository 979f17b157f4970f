"""``powergrad run``: runs an unmodified training program with altered gradients.

:func:`launch` executes a :class:`Program` with :class:`Options`. It needs only torch.
"""

from powergrad.launch.options import Options
from powergrad.launch.program import Program
from powergrad.launch.session import NOT_ALTERED, launch

__all__ = ["NOT_ALTERED", "Options", "Program", "launch"]
