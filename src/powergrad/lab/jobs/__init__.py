"""What a run is, and the queue that executes runs on one machine or several.

A :class:`Program` makes the :class:`Job` of an arm and a seed. Queue, study, statistics and page
know no more of a run than what `Job` promises. To add a kind of run, write a subclass of each and
add it to `KINDS` and `PROGRAMS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from powergrad.lab.jobs.command import CommandJob, CommandProgram
from powergrad.lab.jobs.failures import RunsFailed
from powergrad.lab.jobs.function import FunctionJob, FunctionProgram
from powergrad.lab.jobs.job import Changes, Job, JobError, Program, RunFailed
from powergrad.lab.jobs.recipe import RecipeJob, RecipeProgram

__all__ = [
    "Changes",
    "CommandJob",
    "CommandProgram",
    "FunctionJob",
    "FunctionProgram",
    "Job",
    "JobError",
    "Program",
    "RecipeJob",
    "RecipeProgram",
    "RunFailed",
    "RunsFailed",
    "job_from_dict",
    "program_from_dict",
]

KINDS: dict[str, type[Job]] = {
    "command": CommandJob,
    "function": FunctionJob,
    "recipe": RecipeJob,
}
PROGRAMS: dict[str, type[Program]] = {
    "command": CommandProgram,
    "function": FunctionProgram,
    "recipe": RecipeProgram,
}


def job_from_dict(values: Mapping[str, Any]) -> Job:
    """The job that :meth:`Job.to_dict` described; a kind is named since format 2 of a study."""
    return KINDS[values.get("kind", "recipe")].from_dict(values)


def program_from_dict(values: Mapping[str, Any]) -> Program:
    """The program that :meth:`Program.to_dict` described, from a study of any format."""
    return PROGRAMS[values.get("program", "recipe")].from_dict(values)
