"""``powergrad run``: an unmodified training program, executed with altered gradients.

:func:`launch` executes a :class:`Program` with the :class:`Options` that say what is altered. It
needs torch alone.
"""

from powergrad.launch.options import Options
from powergrad.launch.program import Program
from powergrad.launch.session import NOT_ALTERED, launch

__all__ = ["NOT_ALTERED", "Options", "Program", "launch"]
