"""PowerGrad Transform: altered gradients in the backward pass of softmax cross-entropy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from powergrad import operators as _operators  # noqa: F401  # registers them
from powergrad import parallel as _parallel  # noqa: F401  # does what `OF_DTENSORS` names
from powergrad._version import __version__
from powergrad.alter import alter_gradient
from powergrad.calibration import fold_alpha
from powergrad.clip import adaptive_clip_grad_, clip_grads_before_step
from powergrad.identity import equivalent_training
from powergrad.kernels import available as native_available
from powergrad.linear import LinearCrossEntropyLoss, linear_cross_entropy
from powergrad.loss import CrossEntropyLoss, binary_cross_entropy_with_logits, cross_entropy
from powergrad.mode import PowerGrad, disable, enable
from powergrad.monitor import FilterMonitor, census
from powergrad.reporting import report
from powergrad.transform import log_softmax, paper_smoothing, power_transform, stationary_threshold
from powergrad.verify import verify

if TYPE_CHECKING:
    from powergrad.lab.compare_function import compare

__all__ = [
    "CrossEntropyLoss",
    "FilterMonitor",
    "LinearCrossEntropyLoss",
    "PowerGrad",
    "__version__",
    "adaptive_clip_grad_",
    "alter_gradient",
    "binary_cross_entropy_with_logits",
    "census",
    "clip_grads_before_step",
    "compare",
    "cross_entropy",
    "disable",
    "enable",
    "equivalent_training",
    "fold_alpha",
    "linear_cross_entropy",
    "log_softmax",
    "native_available",
    "paper_smoothing",
    "power_transform",
    "report",
    "stationary_threshold",
    "verify",
]


def __dir__() -> list[str]:
    return [*globals(), "compare"]


def __getattr__(name: str) -> Any:
    """Import `compare`, which needs the workbench, only when it is used."""
    if name != "compare":
        raise AttributeError(f"module 'powergrad' has no attribute {name!r}")
    try:
        return import_module("powergrad.lab.compare_function").compare
    except ImportError as error:
        message = (
            "Expected the workbench to be installed for `powergrad.compare` (pip install "
            f"'powergrad[lab]'), but got: {error}."
        )

    def compare(*_: object, **__: object) -> None:  # so that `from powergrad import *` works
        """Compare the arms of a training: needs the workbench, which is not installed."""
        raise ImportError(message)

    return compare
