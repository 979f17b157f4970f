"""Runs of a command: a user's training program, unmodified.

out/                the folder ``{out}``, for the files of the program
output.txt          its standard output and standard error
report.json         the metrics that it reported with ``powergrad.report``
powergrad.json      the summary of ``powergrad run``
environment.json    versions, hardware and the complete command
result.json         the final metrics; it exists if the run is finished
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import string
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

from powergrad.lab.environment import describe_machine
from powergrad.lab.files import write_json
from powergrad.lab.runs.jobs import Changes, ForeignProgram, Job, RunFailed, check_distinct, digest
from powergrad.lab.runs.process import describe_exit, end_leftovers, last_lines, run_process
from powergrad.lab.runs.sources import Missing, Sources
from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.trainer.run_folder import Result, Run
from powergrad.lab.words import did_you_mean
from powergrad.reporting import VARIABLE

FLAGS = "flags"  # the key of the flags that an arm adds; its other keys are of `powergrad run`
OWN = ("seed", "out", "arm")  # the placeholders of every run
PYTHON = re.compile(r"(python|pypy)\d*(\.\d+)*t?")
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
TAKES_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of Python


# The command --------------------------------------------------------------------------------------


def placeholders(tokens: Sequence[str]) -> list[str]:
    """The names in braces in some tokens."""
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
                wanted = "Expected placeholders such as {seed}, and {{ and }} for literal braces"
                raise RecipeError(f"{wanted}, but got {token!r}.")
            names.append(name)
    return list(dict.fromkeys(names))


def _quoted(token: str) -> str:
    """Quote a token for a shell; braces are not quoted, so that a command stays readable."""
    return token if re.fullmatch(r"[\w@%+=:,./{}-]+", token) else shlex.quote(token)


@dataclass(frozen=True)
class _Parts:
    """A command that can run under ``powergrad run``."""

    before: tuple[str, ...]  # the interpreter or torchrun, with options
    program: tuple[str, ...]  # the script or module with its arguments
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
        for place, token in enumerate(rest):
            if token in ("-m", "--module") or token.endswith(".py"):
                first = token if token.endswith(".py") else "-m"
                return cls((*before, *rest[:place]), (first, *rest[place + 1 :]), True)
        return None

    def altered(self, options: Sequence[str]) -> list[str]:
        """The command with options of ``powergrad run``."""
        return [*self.before, "-m", "powergrad", "run", *options, "--", *self.program]

    @property
    def script(self) -> str:
        """The script; empty for a module."""
        return "" if self.program[0] == "-m" else self.program[0]

    @property
    def name(self) -> str:
        return self.script or "".join(self.program[1:2])


# The program --------------------------------------------------------------------------------------


class CommandProgram(ForeignProgram):
    """A command that each arm runs with its own options of ``powergrad run``, or its own flags.

    The changes of an arm are options of ``powergrad run`` (``--alpha``), flags that are added to
    the command (`FLAGS`), and values of tuned placeholders. The fingerprint is that of the script.
    """

    kind: Literal["command"] = "command"
    command: tuple[str, ...]
    sources: Sources = Sources()
    head: str | None = None  # the name of the head, if ``powergrad run`` cannot find it
    tuned: tuple[str, ...] = ()  # the tuned placeholders

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
                got = f"{parts.script!r}: {error.strerror}"
                raise RecipeError(f"Expected a script after `--`, but got {got}.") from None
            fingerprint = f"sha256:{digest(content)}"
        values = {"command": tuple(command), "head": head, "tuned": tuple(tuned)}
        program = cls(sources=sources, fingerprint=fingerprint, **values)
        if "seed" not in placeholders(command):
            wanted = "Expected {seed} in the command, such as `-- python train.py --seed {seed}`"
            raise RecipeError(f"{wanted}, but got {program.title!r}.")
        for _, path, _ in sources.files:
            program._check_placeholders(placeholders([path]))
        return program

    def _check_placeholders(self, names: Sequence[str]) -> None:
        known = [*OWN, *self.tuned]
        for name in (name for name in names if name not in known):
            listed = ", ".join(f"{{{placeholder}}}" for placeholder in known)
            raise RecipeError(
                f"Expected placeholders among {listed}, or a key of --tune, but got {{{name}}}"
                f"{did_you_mean(name, known)} Write {{{{ and }}}} for braces."
            )

    @property
    def parts(self) -> _Parts | None:
        return _Parts.of(self.command)

    @property
    def is_distributed(self) -> bool:
        return self.parts is not None and self.parts.is_distributed

    @property
    def key(self) -> str:
        values = self.model_dump_json(exclude={"fingerprint": True, "sources": {"wanted"}})
        return digest(values)

    @property
    def data_name(self) -> str:
        name = self.parts.name if self.parts else self.command[0]
        return Path(name).name.removesuffix(".py")

    @property
    def title(self) -> str:
        return " ".join(map(_quoted, self.command))

    @property
    def changing(self) -> str:
        return f"{self.parts.script if self.parts else 'The script'} has changed"

    def identity(self, arm: str, changes: Changes, seed: int) -> str:
        command, values, options = self._resolve(arm, changes, seed)
        places = self.sources.model_dump(exclude={"wanted"})
        del values["seed"]
        return digest(json.dumps([command, values, options, places, self.fingerprint]))[:10]

    def _resolve(
        self, arm: str, changes: Changes, seed: int
    ) -> tuple[list[str], dict[str, Any], list[str] | None]:
        """The command, its placeholders, and the options of ``powergrad run`` if it can be used."""
        command = [*self.command, *changes.get(FLAGS, ())]
        tuned = {k: v for k, v in changes.items() if k != FLAGS and not k.startswith("--")}
        given = {k: v for k, v in changes.items() if k.startswith("--")}
        if self.head and given.keys() & {"--agc", "--head-lr-scale"}:
            given["--head"] = self.head
        options = [str(token) for pair in given.items() for token in pair]
        values = {"seed": seed, "arm": arm, **tuned}
        return command, values, options if self.parts is not None else None

    def perform(self, job: Job, run: Run) -> Result:
        report, output = run.folder / "report.json", run.folder / "output.txt"
        summary, out = run.folder / "powergrad.json", run.folder / "out"
        end_leftovers(VARIABLE, str(report))  # from a worker that was killed
        run.clear()
        out.mkdir()
        command, values, options = self._resolve(job.arm, job.changes, job.seed)
        texts = {name: str(value) for name, value in {**values, "out": out}.items()}
        command = [token.format(**texts) for token in command]
        if options is not None:
            parts = _Parts.of(command)
            assert parts is not None
            command = parts.altered([*options, "--json", str(summary)])
        described = describe_machine() | {"command": shlex.join(command)}
        write_json(run.folder / "environment.json", described)
        began = time.monotonic()
        code, memory = run_process(
            command, output, {VARIABLE: str(report), "PYTHONUNBUFFERED": "1"}
        )
        seconds = round(time.monotonic() - began, 3)
        about = {} if options is None else _check_altered(code, summary, is_altered=bool(options))
        tail = f"The last lines of {output}:\n{last_lines(output)}"
        if code:
            raise RunFailed(f"{describe_exit(code)}. {tail}")
        try:
            measured = {"seconds": seconds, "memory": round(memory, 1)}
            metrics = self.sources.read(output, report, out, texts, measured)
        except Missing as error:
            raise RunFailed(f"{error} {tail}") from None
        return Result(metrics=metrics, about=about)

    def alpha(self, changes: Changes) -> float:
        return changes.get("--alpha", 1.0)

    def check_arms(self, arms: Mapping[str, Changes]) -> None:
        runs = {}
        for arm, changes in arms.items():
            if any(name.startswith("--") for name in changes) and self.parts is None:
                raise RecipeError(
                    f"Expected a command that starts with python, a .py file or torchrun, because "
                    f"the arm {arm!r} alters gradients, but got {self.title!r}. Arms that only add "
                    'flags, such as --arm "wide: --width 64", work with every command.'
                )
            names = placeholders([*self.command, *changes.get(FLAGS, ())])
            self._check_placeholders(names)
            runs[arm] = self.identity(arm if "arm" in names else "", changes, 0)
        check_distinct(runs)

    def check_tuned(self, arm: str, changes: Changes, keys: Sequence[str]) -> None:
        """Check that the command of an arm has a placeholder for every key that is tuned for it."""
        names = placeholders([*self.command, *changes.get(FLAGS, ())])
        for key in (key for key in keys if key not in names):
            wanted = f"{{{key}}} in the command, because {key!r} is tuned for the arm {arm!r}"
            raise RecipeError(f"Expected {wanted}, but got {self.title!r}.")
        for name in (name for name in names if name not in (*OWN, *keys)):
            wanted = f"--tune for {{{name}}} in the command of the arm {arm!r}"
            raise RecipeError(f"Expected {wanted}, but got only {', '.join(keys)}.")


def _check_altered(code: int, path: Path, *, is_altered: bool) -> dict[str, Any]:
    """The first loss and the optimizers, from the summary of ``powergrad run``."""
    if not path.is_file():
        if code == 0 and is_altered:
            reason = "it ended without a summary of `powergrad run` (with os._exit or exec)"
            raise RunFailed(f"{reason}, so it is not known whether it was altered.", stops=True)
        return {}
    summary = json.loads(path.read_text())
    if code and summary["problems"]:  # torchrun has its own exit code
        problems = " ".join(summary["problems"])
        raise RunFailed(f"the program was not altered as requested: {problems}", stops=True)
    optimizers = [optimizer["class"] for optimizer in summary["optimizers"]]
    return {"optimizers": optimizers, "first_loss": summary["first_loss"]}
