"""What is said of runs that failed: one message per cause, and a full disk by its name."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

from powergrad.lab.jobs.job import JobError

__all__ = ["DISK_FULL", "describe_failures", "disk_full_error", "is_disk_full", "same_failure"]

DISK_FULL = 28  # the exit code of a worker that can write nothing any more
SHOWN = 8  # causes, at most


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is that the disk is full.

    SQLite, through which runs are queued, says so in words only.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "disk is full" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_full_error(folder: Path) -> JobError:
    """The error of a study whose disk is full."""
    return JobError(
        f"The disk is full: nothing more can be written to {str(folder)!r}, so the study stops. "
        "What is finished stays. Free some space, and the same command continues."
    )


def same_failure(failed: Mapping[str, str]) -> str | None:
    """The reason for which all runs failed; None if there are several."""
    reasons = _by_reason(failed)
    return next(iter(failed.values())) if len(reasons) == 1 else None


def describe_failures(failed: Mapping[str, str], total: int) -> str:
    """Which of `total` runs failed and why, each reason once.

    Args:
        failed: The reason for each run that failed, by its name.
        total: How many runs there are.

    Example:
        >>> print(describe_failures({"a-seed0": "no memory", "a-seed1": "no memory"}, 8))
        2 of 8 runs could not be done:
          a-seed0 and 1 more: no memory
    """
    lines = [f"{len(failed)} of {total} runs could not be done:"]
    reasons = _by_reason(failed)
    for names in list(reasons.values())[:SHOWN]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"  {names[0]}{more}: {failed[names[0]]}")
    if len(reasons) > SHOWN:
        lines.append(f"  and {len(reasons) - SHOWN} other reasons")
    return "\n".join(lines)


def _by_reason(failed: Mapping[str, str]) -> dict[str, list[str]]:
    """The runs of each reason, in which the name of the run itself does not count."""
    reasons: dict[str, list[str]] = {}
    for name, reason in failed.items():
        reasons.setdefault(reason.replace(name, ""), []).append(name)
    return reasons
