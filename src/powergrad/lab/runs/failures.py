"""Messages about failed runs: one per cause, with a special one for a full disk."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powergrad.lab.runs.jobs import JobError

SHOWN = 8  # the maximal number of causes to show


class RunsFailed(JobError):  # noqa: N818
    """Some runs of a study failed; the others are finished.

    Attributes:
        failed: The reasons, by the name of the run.
        results: The results of the others.
    """

    def __init__(self, failed: Mapping[str, str], results: Mapping[str, Any]) -> None:
        self.failed, self.results = dict(failed), dict(results)
        super().__init__(describe_failures(failed, len(failed) + len(results)))


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error or its cause is a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_full_error(folder: Path) -> JobError:
    """The error of a study whose disk is full."""
    return JobError(
        f"The disk is full: nothing more can be written to {str(folder)!r}, so the study stops. "
        "Finished runs are kept. Free some space and run the same command to continue."
    )


def same_failure(failed: Mapping[str, str]) -> str | None:
    """The reason why all runs failed; None if there are several reasons."""
    return next(iter(failed.values())) if len(_by_reason(failed)) == 1 else None


def describe_failures(failed: Mapping[str, str], total: int) -> str:
    """A message about failed runs, with each reason once.

    Example:
        >>> print(describe_failures({"a-seed0": "no memory", "a-seed1": "no memory"}, 8))
        2 of 8 runs failed:
          a-seed0 and 1 more: no memory
    """
    lines = [f"{len(failed)} of {total} runs failed:"]
    reasons = _by_reason(failed)
    for names in list(reasons.values())[:SHOWN]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"  {names[0]}{more}: {failed[names[0]]}")
    if len(reasons) > SHOWN:
        lines.append(f"  and {len(reasons) - SHOWN} other reasons")
    return "\n".join(lines)


def _by_reason(failed: Mapping[str, str]) -> dict[str, list[str]]:
    """The runs by reason, ignoring the name of the run in it."""
    reasons: dict[str, list[str]] = {}
    for name, reason in failed.items():
        reasons.setdefault(reason.replace(name, ""), []).append(name)
    return reasons
