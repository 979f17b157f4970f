"""What a run is (a recipe, a command or a function), and the pool that executes runs."""

from typing import Annotated

from pydantic import Field

from powergrad.lab.runs.commands import CommandProgram
from powergrad.lab.runs.functions import FunctionProgram
from powergrad.lab.runs.jobs import Changes, Job, JobError, Program, Record, RunFailed
from powergrad.lab.runs.recipes import RecipeProgram

# The program of a study, as it is read from a file.
AnyProgram = Annotated[
    RecipeProgram | CommandProgram | FunctionProgram, Field(discriminator="kind")
]

__all__ = [
    "AnyProgram",
    "Changes",
    "CommandProgram",
    "FunctionProgram",
    "Job",
    "JobError",
    "Program",
    "RecipeProgram",
    "Record",
    "RunFailed",
]
