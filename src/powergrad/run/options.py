"""The options of ``powergrad run``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from powergrad.checks import check_number, check_threshold
from powergrad.clip import ClipThresholds
from powergrad.monitor import Recording
from powergrad.run.scaling import Scales

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """The options of ``powergrad run``; the defaults change nothing.

    Raises:
        ValueError: If an option is out of range, or `monitor` already holds a recording.
    """

    alpha: float = 1.0
    agc: float | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    decay_scale: float = 1.0
    lr_scale: float = 1.0
    head_lr_scale: float = 1.0
    head: str | None = None
    monitor: Path | None = None
    seed: int | None = None
    strict: bool = False
    json: Path | None = None

    def __post_init__(self) -> None:
        check_number(self.alpha, "--alpha")
        for name in ("agc", "clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None:
                check_threshold(value, _option(name))
        for name, least in (("decay_scale", "at least 0"), ("lr_scale", ""), ("head_lr_scale", "")):
            value = getattr(self, name)
            if not (math.isfinite(value) and (value > 0 or (value == 0 and least))):
                raise ValueError(
                    f"Expected `{_option(name)}` to be {least or 'positive'}, but got {value}."
                )
        if self.monitor is not None and Recording.exists(self.monitor):
            raise ValueError(
                "Expected `--monitor` to be a folder without a recording, but got "
                f"{str(self.monitor)!r}, which holds one."
            )
        if self.json is not None and not self.json.parent.is_dir():
            raise ValueError(
                f"Expected `--json` to be a file in an existing folder, but got {str(self.json)!r}."
            )

    @property
    def thresholds(self) -> ClipThresholds:
        """The thresholds for :func:`powergrad.clip_grads_before_step`."""
        known = {"agc": self.agc, "norm": self.clip_norm, "value": self.clip_value}
        return ClipThresholds(**{k: v for k, v in known.items() if v is not None})  # type: ignore[typeddict-item]

    @property
    def scales(self) -> Scales:
        """The factors of learning rates and weight decays."""
        return Scales(self.lr_scale, self.head_lr_scale, self.decay_scale)


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"
