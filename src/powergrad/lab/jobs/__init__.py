"""Runs, and the queue that executes them on one or several machines.

A :class:`Program` creates the :class:`Job` of an arm and a seed. Queue, study, statistics and page
use only the interface of `Job`. To add a kind of run, write a subclass of each and add it to
`KINDS` and `PROGRAMS`.
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
    """The inverse of :meth:`Job.to_dict`; studies of format 1 have no kind."""
    return KINDS[values.get("kind", "recipe")].from_dict(values)


def program_from_dict(values: Mapping[str, Any]) -> Program:
    """The inverse of :meth:`Program.to_dict`, for a study of any format."""
    return PROGRAMS[values.get("program", "recipe")].from_dict(values)
