"""What a run is (a recipe, a command or a function), and the pool that executes runs."""

from typing import Annotated

from pydantic import Field

from powergrad.lab.runs.commands import CommandProgram
from powergrad.lab.runs.functions import FunctionProgram
from powergrad.lab.runs.jobs import Changes as Changes
from powergrad.lab.runs.jobs import Job as Job
from powergrad.lab.runs.jobs import JobError as JobError
from powergrad.lab.runs.jobs import Program as Program
from powergrad.lab.runs.jobs import Record as Record
from powergrad.lab.runs.jobs import RunFailed as RunFailed
from powergrad.lab.runs.recipes import RecipeProgram

# The program of a study, as it is read from a file.
AnyProgram = Annotated[
    RecipeProgram | CommandProgram | FunctionProgram, Field(discriminator="kind")
]
