"""Runs of a command: a user's training program, unmodified.

out/                the folder ``{out}``, for the files of the program
output.txt          its standard output and standard error
report.json         the metrics that it reported with ``powergrad.report``
powergrad.json      the summary of ``powergrad run``
environment.json    versions, hardware and the complete command
result.json         the final metrics; it exists if the run is finished
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import string
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self, override

from powergrad.lab.environment import describe_machine
from powergrad.lab.files import write_json
from powergrad.lab.jobs.job import Changes, Job, Program, RunFailed, merge_result, split_result
from powergrad.lab.jobs.process import describe_exit, end_leftovers, last_lines, run_process
from powergrad.lab.jobs.sources import Missing, Sources
from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.trainer.run_folder import Run
from powergrad.lab.words import did_you_mean, slug
from powergrad.reporting import VARIABLE

FLAGS = "flags"  # the key of the flags that an arm adds; its other keys are of `powergrad run`
OWN = ("seed", "out", "arm")  # the placeholders of every run
PYTHON = re.compile(r"(python|pypy)\d*(\.\d+)*t?")
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
TAKES_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of Python


# The command --------------------------------------------------------------------------------------


def placeholders(tokens: Sequence[str]) -> list[str]:
    """The names in braces in some tokens.

    Example:
        >>> placeholders(["train.py", "--seed={seed}", "--set={{a: 1}}"])
        ['seed']
    """
    names = []
    for token in tokens:
        try:
            parts = list(string.Formatter().parse(token))
        except ValueError:
            parts = [("", token, "", None)]
        for _, name, spec, conversion in parts:
            if name is None:
                continue
            if spec or conversion or not name.isidentifier():
                raise RecipeError(
                    "Expected placeholders such as {seed}, and {{ and }} for literal braces, but "
                    f"got {token!r}."
                )
            names.append(name)
    return list(dict.fromkeys(names))


def _fill(token: str, values: Mapping[str, Any]) -> str:
    return token.format(**{name: str(value) for name, value in values.items()})


def _quoted(token: str) -> str:
    """Quote a token for a shell; braces are not quoted, so that a command stays readable."""
    return token if re.fullmatch(r"[\w@%+=:,./{}-]+", token) else shlex.quote(token)


@dataclass(frozen=True)
class _Parts:
    """A command that can run under ``powergrad run``.

    Attributes:
        before: The part before ``-m powergrad run``: the interpreter or torchrun, with options.
        program: The part after it: the script or module with its arguments.
        is_distributed: Whether it is run by torchrun.
    """

    before: tuple[str, ...]
    program: tuple[str, ...]
    is_distributed: bool = False

    @classmethod
    def of(cls, command: Sequence[str]) -> _Parts | None:
        """The parts of a command; None if it does not start with a known program."""
        first, *rest = command
        if Path(first).name in TORCHRUN:
            return cls._of_torchrun((first,), rest)
        if first.endswith(".py"):
            return cls((sys.executable,), tuple(command))
        if not PYTHON.fullmatch(Path(first).name) and first != sys.executable:
            return None
        place = 0
        while place < len(rest) and rest[place].startswith("-") and rest[place] not in ("-m", "-c"):
            place += 2 if rest[place] in TAKES_VALUE else 1
        before, program = (first, *rest[:place]), rest[place:]
        if program[:1] == ["-m"] and program[1:2] and program[1] in TORCHRUN:
            return cls._of_torchrun((*before, *program[:2]), program[2:])
        return cls(before, tuple(program)) if program and program[0] != "-c" else None

    @classmethod
    def _of_torchrun(cls, before: tuple[str, ...], rest: Sequence[str]) -> _Parts | None:
        place = next((i for i, t in enumerate(rest) if t in ("-m", "--module")), None)
        script = next((i for i, t in enumerate(rest) if t.endswith(".py")), None)
        if place is not None and (script is None or place < script):
            return cls((*before, *rest[:place]), ("-m", *rest[place + 1 :]), is_distributed=True)
        if script is None:
            return None
        return cls((*before, *rest[:script]), tuple(rest[script:]), is_distributed=True)

    def altered(self, options: Sequence[str]) -> list[str]:
        """The command with options of ``powergrad run``."""
        return [*self.before, "-m", "powergrad", "run", *options, "--", *self.program]

    @property
    def script(self) -> str:
        """The script; empty for a module."""
        return "" if self.program[0] == "-m" else self.program[0]

    @property
    def name(self) -> str:
        """The name of the script or module."""
        named = self.program[1:2] if self.program[0] == "-m" else self.program[:1]
        return named[0] if named else ""


# One run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommandJob(Job):
    """One run of a command.

    Attributes:
        command: Program and arguments, with placeholders.
        values: The values of the placeholders, except ``{out}``, which differs between machines.
        options: The options of ``powergrad run``; None if the command cannot run under it.
        sources: The sources of its metrics.
    """

    is_foreign: ClassVar[bool] = True
    command: tuple[str, ...]
    values: Mapping[str, Any]
    options: tuple[str, ...] | None
    sources: Sources

    @override
    def execute(self, folder: Path) -> dict[str, Any]:
        run = Run(folder.resolve() / self.name)
        with run.hold():
            finished = run.result()
            result = {} if finished is None else merge_result(finished)
            if finished is None:
                result = self._execute(run)
                run.finish(split_result(result))
        return result

    def _execute(self, run: Run) -> dict[str, Any]:
        report, output = run.folder / "report.json", run.folder / "output.txt"
        summary, out = run.folder / "powergrad.json", run.folder / "out"
        end_leftovers(VARIABLE, str(report))  # from a worker that was killed
        run.clear()
        out.mkdir()
        fill = partial(_fill, values={**self.values, "out": str(out)})
        command = [fill(token) for token in self.command]
        if self.options is not None:
            parts = _Parts.of(command)
            assert parts is not None
            command = parts.altered([*self.options, "--json", str(summary)])
        described = describe_machine() | {"command": shlex.join(command)}
        write_json(run.folder / "environment.json", described)
        began = time.monotonic()
        own = {VARIABLE: str(report), "PYTHONUNBUFFERED": "1"}
        code = run_process(command, output, own)
        seconds = time.monotonic() - began
        about = self._check_altered(code, summary)
        tail = f"The last lines of {output}:\n{last_lines(output)}"
        if code:
            raise RunFailed(f"{describe_exit(code)}. {tail}")
        try:
            metrics = self.sources.read(output, report, out, fill)
        except (Missing, RecipeError) as error:
            raise RunFailed(f"{error} {tail}") from None
        return {**metrics, **about, "seconds": round(seconds, 3)}

    def _check_altered(self, code: int, path: Path) -> dict[str, Any]:
        """The first loss and the optimizers, from the summary of ``powergrad run``."""
        if self.options is None:
            return {}
        summary = json.loads(path.read_text()) if path.is_file() else None
        if code and summary and summary["problems"]:  # torchrun has its own exit code
            problems = " ".join(summary["problems"])
            raise RunFailed(f"the program was not altered as requested: {problems}", stops=True)
        if code == 0 and summary is None and self.options:
            raise RunFailed(
                "the program ended without a summary of `powergrad run` (with os._exit or exec), "
                "so it is not known whether it was altered.",
                stops=True,
            )
        if summary is None:
            return {}
        loss = summary["first_loss"]
        optimizers = [optimizer["class"] for optimizer in summary["optimizers"]]
        return {"optimizers": optimizers, **({} if loss is None else {"first_loss": loss})}

    @override
    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "command",
            "name": self.name,
            "command": list(self.command),
            "values": dict(self.values),
            "options": None if self.options is None else list(self.options),
            "sources": self.sources.to_dict(),
        }

    @classmethod
    @override
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        options = values["options"]
        return cls(
            values["name"],
            tuple(values["command"]),
            values["values"],
            None if options is None else tuple(options),
            Sources.from_dict(values["sources"]),
        )


# The program --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommandProgram(Program):
    """A command that each arm runs with its own options of ``powergrad run``, or its own flags.

    The changes of an arm are options of ``powergrad run`` (``--alpha``), flags that are added to
    the command (`FLAGS`), and values of tuned placeholders.

    Attributes:
        command: Program and arguments, with placeholders.
        sources: The sources of its metrics.
        head: The name of the head, if ``powergrad run`` cannot find it.
        tuned: The tuned placeholders.
        fingerprint: The fingerprint of the script; runs of a changed script are not reused.
    """

    is_foreign: ClassVar[bool] = True

    command: tuple[str, ...]
    sources: Sources = field(default_factory=Sources)
    head: str | None = None
    tuned: tuple[str, ...] = ()
    fingerprint: str = ""

    @classmethod
    def of(
        cls,
        command: Sequence[str],
        sources: Sources,
        *,
        head: str | None = None,
        tuned: Iterable[str] = (),
    ) -> Self:
        """The program of a command, with the current fingerprint of its script."""
        parts = _Parts.of(command)
        first = command[0] if parts is None else parts.before[0]
        if shutil.which(first) is None:
            remedy = "; write python before it" if Path(first).is_file() else ""
            raise RecipeError(f"Expected a program after `--`, but got {first!r}{remedy}.")
        fingerprint = ""
        if parts is not None and parts.script and not placeholders([parts.script]):
            try:
                content = Path(parts.script).read_bytes()
            except OSError as error:
                raise RecipeError(
                    f"Expected a script after `--`, but got {parts.script!r}: {error.strerror}."
                ) from None
            fingerprint = f"sha256:{hashlib.sha256(content).hexdigest()}"
        program = cls(tuple(command), sources, head, tuple(tuned), fingerprint)
        if "seed" not in placeholders(command):
            raise RecipeError(
                "Expected the placeholder {seed} in the command, such as `-- python train.py "
                f"--seed {{seed}}`, but got {program.title!r}."
            )
        for _, path, _ in sources.files:
            program._check_placeholders(placeholders([path]))
        return program

    def _check_placeholders(self, names: Sequence[str]) -> None:
        known = [*OWN, *self.tuned]
        for name in names:
            if name not in known:
                listed = ", ".join(f"{{{placeholder}}}" for placeholder in known)
                raise RecipeError(
                    f"Expected placeholders among {listed}, or a key of --tune, but got "
                    f"{{{name}}}{did_you_mean(name, known)} Write {{{{ and }}}} for braces."
                )

    @property
    def parts(self) -> _Parts | None:
        """The parts of the command, if it can run under ``powergrad run``."""
        return _Parts.of(self.command)

    @property
    def is_distributed(self) -> bool:
        """Whether torchrun runs it."""
        return self.parts is not None and self.parts.is_distributed

    @property
    def _places(self) -> dict[str, Any]:
        """The sources of metrics, without the metrics that are compared."""
        return {name: value for name, value in self.sources.to_dict().items() if name != "wanted"}

    @property
    @override
    def key(self) -> str:
        values = {
            name: value for name, value in self.to_dict().items() if "fingerprint" not in name
        }
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    @property
    @override
    def data_name(self) -> str:
        name = self.parts.name if self.parts else self.command[0]
        return Path(name).name.removesuffix(".py")

    @property
    @override
    def title(self) -> str:
        return " ".join(map(_quoted, self.command))

    @property
    @override
    def changing(self) -> str:
        return f"{self.parts.script if self.parts else 'The script'} has changed"

    @override
    def job(self, arm: str, changes: Changes, seed: int) -> CommandJob:
        command = (*self.command, *changes.get(FLAGS, ()))
        tuned = {name: value for name, value in changes.items() if not _is_of_arm(name)}
        values = {"seed": seed, "arm": arm, **tuned}
        options: tuple[str, ...] | None = None
        if self.parts is not None:
            given = {name: value for name, value in changes.items() if name.startswith("--")}
            needs_head = given.keys() & {"--agc", "--head-lr-scale"}
            head = {"--head": self.head} if self.head and needs_head else {}
            options = tuple(str(t) for pair in {**given, **head}.items() for t in pair)
        identity = json.dumps([arm, command, tuned, options, self._places, self.fingerprint])
        digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
        name = f"{slug(arm)[:40]}-seed{seed}-{digest}"
        return CommandJob(name, command, values, options, self.sources)

    @override
    def alpha(self, changes: Changes) -> float:
        return changes.get("--alpha", 1.0)

    @override
    def check_arms(self, arms: Mapping[str, Changes]) -> None:
        arm_by_run: dict[str, str] = {}
        for arm, changes in arms.items():
            job = self.job("", changes, 0)
            if any(name.startswith("--") for name in changes) and self.parts is None:
                raise RecipeError(
                    f"Expected a command that starts with python, a .py file or torchrun, because "
                    f"the arm {arm!r} alters gradients, but got {self.title!r}. Arms that only add "
                    'flags, such as --arm "wide: --width 64", work with every command.'
                )
            names = placeholders(job.command)
            self._check_placeholders(names)
            other = arm_by_run.setdefault(job.name, arm)
            if other != arm and "arm" not in names:
                raise RecipeError(
                    f"Expected arms that differ, but got {other!r} and {arm!r}, which are the same "
                    "run."
                )

    def check_tuned(self, arm: str, changes: Changes, keys: Sequence[str]) -> None:
        """Check that the command of an arm has a placeholder for every key that is tuned for it."""
        names = placeholders([*self.command, *changes.get(FLAGS, ())])
        for key in keys:
            if key not in names:
                raise RecipeError(
                    f"Expected the placeholder {{{key}}} in the command, because {key!r} is tuned "
                    f"for the arm {arm!r}, but got {self.title!r}."
                )
        for name in names:
            if name not in (*OWN, *keys):
                raise RecipeError(
                    f"Expected --tune for {name!r} of the arm {arm!r}, because the command has "
                    f"{{{name}}}, but got only {', '.join(keys)}."
                )

    @override
    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "program": "command",
            "command": list(self.command),
            "metrics": self._places,
            "head": self.head,
            "placeholders": list(self.tuned),
        }
        if self.fingerprint:
            values["data_fingerprint"] = self.fingerprint
        return values

    @classmethod
    @override
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(
            tuple(values["command"]),
            Sources.from_dict(values["metrics"]),
            values["head"],
            tuple(values["placeholders"]),
            values.get("data_fingerprint", ""),
        )


def _is_of_arm(name: str) -> bool:
    return name == FLAGS or name.startswith("--")
