"""Runs of a command: a user's training program, unmodified.

out/                the folder ``{out}``, for the files of the program
output.txt          its standard output and standard error
report.json         the metrics that it reported with ``powergrad.report``
powergrad.json      the summary of ``powergrad run``
environment.json    versions, hardware, commit and the complete command
uncommitted.diff    the changes of the user's tree since its commit
code/               while the run lasts: the checkout of an arm with a git ref
result.json         the final metrics; it exists if the run is finished
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import string
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

from powergrad.lab.environment import commit_of, describe_machine, git
from powergrad.lab.files import write_json, write_text
from powergrad.lab.runs.code import (
    check_paths,
    checked_out,
    commit_named,
    fingerprint,
    imported_files,
    named_files,
)
from powergrad.lab.runs.jobs import (
    Changes,
    ForeignProgram,
    Job,
    Program,
    RunFailed,
    check_distinct,
    digest,
)
from powergrad.lab.runs.process import describe_exit, end_leftovers, last_lines, run_process
from powergrad.lab.runs.sources import Missing, Sources
from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.trainer.run_folder import Result, Run
from powergrad.lab.words import did_you_mean
from powergrad.reporting import VARIABLE

# The keys of an arm's own changes; its other keys are options of ``powergrad run``. No placeholder
# can have the name of the last three.
FLAGS, COMMAND, REF, VARIABLES = "flags", "own command", "git ref", "environment variables"
OWN = ("seed", "out", "arm")  # the placeholders of every run
PYTHON = re.compile(r"(python|pypy)\d*(\.\d+)*t?")
LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
LAUNCHERS += ("accelerate-launch", "accelerate.commands.launch")
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
        if Path(first).name in LAUNCHERS:
            return cls._of_launcher((first,), rest)
        if Path(first).name == "accelerate" and rest[:1] == ["launch"]:
            return cls._of_launcher((first, "launch"), rest[1:])
        if first.endswith(".py"):
            return cls((sys.executable,), tuple(command))
        if not PYTHON.fullmatch(Path(first).name) and first != sys.executable:
            return None
        place = 0
        while place < len(rest) and rest[place].startswith("-") and rest[place] not in ("-m", "-c"):
            place += 2 if rest[place] in TAKES_VALUE else 1
        before, program = (first, *rest[:place]), rest[place:]
        if program[:1] == ["-m"] and program[1:2] and program[1] in LAUNCHERS:
            return cls._of_launcher((*before, *program[:2]), program[2:])
        return cls(before, tuple(program)) if program and program[0] != "-c" else None

    @classmethod
    def _of_launcher(cls, before: tuple[str, ...], rest: Sequence[str]) -> _Parts | None:
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
    """A command that each arm changes.

    The changes of an arm are options of ``powergrad run`` (``--alpha``), its `COMMAND`, `FLAGS`
    that are added to the command, a git `REF`, environment `VARIABLES`, and values of tuned
    placeholders.
    """

    kind: Literal["command"] = "command"
    command: tuple[str, ...]
    sources: Sources = Sources()
    head: str | None = None  # the name of the head, if ``powergrad run`` cannot find it
    tuned: tuple[str, ...] = ()  # the tuned placeholders
    seed_env: str | None = None  # the environment variable with the seed
    seed_all: bool = False  # whether ``powergrad run`` seeds the program
    unseeded: bool = False  # whether the program has no seed
    timeout: float | None = None  # seconds per run
    # What follows from the arms, see `with_arms`.
    is_altered: bool = False  # whether an arm needs ``powergrad run``, which then runs all arms
    is_distributed: bool = False
    code: Mapping[str, dict[str, str]] = {}  # for each arm, its files with digests, or its commit

    def with_arms(self, arms: Mapping[str, Changes]) -> Self:
        commands = {arm: self._command(changes) for arm, changes in arms.items()}
        parts = [_Parts.of(command) for command in commands.values()]
        code = {arm: _code_of(arm, commands[arm], arms[arm].get(REF)) for arm in arms}
        return self.model_copy(
            update={
                "is_altered": self.seed_all or any(map(_alters, arms.values())),
                "is_distributed": any(part is not None and part.is_distributed for part in parts),
                "code": code,
                "fingerprint": f"sha256:{digest(json.dumps(code))}",
            }
        )

    def _command(self, changes: Changes) -> tuple[str, ...]:
        return *changes.get(COMMAND, self.command), *changes.get(FLAGS, ())

    def _placeholders(self, changes: Changes) -> list[str]:
        return placeholders([*self._command(changes), *changes.get(VARIABLES, {}).values()])

    def _check_placeholders(self, names: Sequence[str]) -> None:
        known = [*OWN, *self.tuned]
        for name in (name for name in names if name not in known):
            listed = ", ".join(f"{{{placeholder}}}" for placeholder in known)
            raise RecipeError(
                f"Expected placeholders among {listed}, or a key of --tune, but got {{{name}}}"
                f"{did_you_mean(name, known)} Write {{{{ and }}}} for braces."
            )

    @property
    def key(self) -> str:
        derived = ("fingerprint", "timeout", "is_altered", "is_distributed", "code")
        hidden: Any = {**dict.fromkeys(derived, True), "sources": {"wanted"}}
        return digest(self.model_dump_json(exclude=hidden))

    @property
    def data_name(self) -> str:
        parts = _Parts.of(self.command)
        return Path(parts.name if parts else self.command[0]).name.removesuffix(".py")

    @property
    def title(self) -> str:
        return " ".join(map(_quoted, self.command))

    def changed_since(self, earlier: Program) -> str:
        before = earlier.code if isinstance(earlier, CommandProgram) else {}
        pairs = [
            (before[arm].items(), self.code[arm].items()) for arm in self.code if arm in before
        ]
        names = sorted({name for old, new in pairs for name, _ in old ^ new})
        return f"{', '.join(names)} {'have' if names[1:] else 'has'} changed" if names else ""

    def identity(self, arm: str, changes: Changes, seed: int) -> str:
        command, values, options = self._resolve(arm, changes, seed)
        places = self.sources.model_dump(exclude={"wanted"})
        varying = {"seed", "arm"} - ({"arm"} & {*self._placeholders(changes)})
        values = {name: value for name, value in values.items() if name not in varying}
        code = [["@" if name[0] == "@" else name, v] for name, v in self.code.get(arm, {}).items()]
        varied = [command, values, options, dict(changes.get(VARIABLES, {})), places, code]
        return digest(json.dumps(varied))[:10]

    def _resolve(
        self, arm: str, changes: Changes, seed: int
    ) -> tuple[list[str], dict[str, Any], list[str] | None]:
        """The command, its placeholders, and the options of ``powergrad run`` if it is used."""
        command = [*self._command(changes)]
        own = (COMMAND, FLAGS, REF, VARIABLES)
        tuned = {k: v for k, v in changes.items() if k not in own and not k.startswith("--")}
        given = {k: v for k, v in changes.items() if k.startswith("--")}
        if self.head and given.keys() & {"--agc", "--head-lr-scale"}:
            given["--head"] = self.head
        options = [str(token) for pair in given.items() for token in pair]
        values = {"seed": seed, "arm": arm, **tuned}
        is_altered = (self.is_altered or _alters(changes)) and _Parts.of(command) is not None
        return command, values, options if is_altered else None

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
            seed = ["--seed", str(job.seed)] if self.seed_all else []
            command = parts.altered([*options, *seed, "--json", str(summary)])
        own = {name: text.format(**texts) for name, text in job.changes.get(VARIABLES, {}).items()}
        own |= {self.seed_env: str(job.seed)} if self.seed_env else {}
        commit = self._describe(job.arm, [*(f"{k}={v}" for k, v in own.items()), *command], run)
        own |= {VARIABLE: str(report), "PYTHONUNBUFFERED": "1"}
        self._check_code(job.arm)
        launched = _Parts.of(command)
        if commit and launched and command[0] in launched.before and os.sep in command[0]:
            command[0] = os.path.abspath(command[0])  # such as that of a virtual environment
        with checked_out(commit, run.folder / "code") as (directory, variables):
            began = time.monotonic()
            code, memory = run_process(command, output, variables | own, directory, self.timeout)
            seconds = round(time.monotonic() - began, 3)
        self._check_code(job.arm)
        is_altered = bool(options) or self.seed_all
        about = {} if options is None else _check_altered(code, summary, is_altered=is_altered)
        tail = f"The last lines of {output}:\n{last_lines(output)}"
        if commit:
            where = f"It ran in a checkout of {commit[:12]}, without ignored files such as data."
            tail = f"{where}\n{tail}"
        if code:
            raise RunFailed(f"{describe_exit(code)}.\n{tail}")
        try:
            measured = {"seconds": seconds, "memory": round(memory, 1)}
            metrics = self.sources.read(output, report, out, texts, measured)
        except Missing as error:
            raise RunFailed(f"{error}\n{tail}") from None
        return Result(metrics=metrics, about=about)

    def _describe(self, arm: str, command: Sequence[str], run: Run) -> str | None:
        """Write environment.json, and the uncommitted changes; return the commit to check out."""
        name, value = next(iter(self.code.get(arm, {}).items()), ("", ""))
        file = Path(name).absolute()
        commit = value[:12] if name[:1] == "@" else commit_of(file) if name else None
        described = {"command": shlex.join(command), "commit": commit}
        write_json(run.folder / "environment.json", describe_machine() | described)
        if commit and commit.endswith("-dirty"):
            write_text(run.folder / "uncommitted.diff", git("diff", "HEAD", cwd=file.parent) or "")
        return value if name[:1] == "@" else None

    def _check_code(self, arm: str) -> None:
        """Raise RunFailed if the files of an arm have changed since the study was started."""
        files = {name: old for name, old in self.code.get(arm, {}).items() if name[0] != "@"}
        if changed := [name for name, old in files.items() if fingerprint(name) != old]:
            raise RunFailed(
                f"{', '.join(changed)} changed during the study, whose runs must all be of the "
                "same code. The same command starts again with the new code; with --reuse-anyway, "
                "it keeps the finished runs. A file that your program writes should be in {out}.",
                stops=True,
            )

    def alpha(self, changes: Changes) -> float:
        return changes.get("--alpha", 1.0)

    def check_arms(self, arms: Mapping[str, Changes]) -> None:
        runs = {}
        for _, path, _ in self.sources.files:
            self._check_placeholders(placeholders([path]))
        for arm, changes in arms.items():
            title = " ".join(map(_quoted, self._command(changes)))
            if (_alters(changes) or self.seed_all) and _Parts.of(self._command(changes)) is None:
                what = "alters gradients" if _alters(changes) else "is seeded with --seed-all"
                raise RecipeError(
                    "Expected a command that starts with python, a .py file, torchrun or "
                    f"`accelerate launch`, because the arm {arm!r} {what}, but got {title!r}. Arms "
                    'of your own, such as --arm "wide: --width 64", work with every command.'
                )
            names = self._placeholders(changes)
            self._check_placeholders(names)
            if ("seed" in names or self.seed_env or self.seed_all) == self.unseeded:
                got = f"{title!r} and --unseeded" if self.unseeded else repr(title)
                raise RecipeError(
                    f"How does the program of the arm {arm!r} get its seed? Expected {{seed}} in "
                    "its command (`-- python train.py --seed {seed}`), --seed-env NAME (an "
                    "environment variable), --seed-all (`powergrad run` seeds torch, numpy and "
                    "random), or --unseeded (it has none, and its runs differ by themselves), but "
                    f"got {got}."
                )
            runs[arm] = self.identity(arm, changes, 0)
        check_distinct(runs)

    def check_tuned(self, arm: str, changes: Changes, keys: Sequence[str]) -> None:
        """Check that the command of an arm has a placeholder for every key that is tuned for it."""
        names = self._placeholders(changes)
        for key in (key for key in keys if key not in names):
            wanted = f"{{{key}}} in the command, because {key!r} is tuned for the arm {arm!r}"
            raise RecipeError(f"Expected {wanted}, but got {self.title!r}.")
        for name in (name for name in names if name not in (*OWN, *keys)):
            wanted = f"--tune for {{{name}}} in the command of the arm {arm!r}"
            raise RecipeError(f"Expected {wanted}, but got only {', '.join(keys)}.")


def _alters(changes: Changes) -> bool:
    """Whether an arm has options of ``powergrad run``."""
    return any(name.startswith("--") for name in changes)


def _code_of(arm: str, command: Sequence[str], ref: str | None) -> dict[str, str]:
    """The commit of an arm, or its files; and the digests of files that its command names."""
    parts = _Parts.of(command)
    first = command[0] if parts is None else parts.before[0]
    if shutil.which(first) is None and (parts is not None or ref is None):
        remedy = "; write python before it" if Path(first).is_file() else ""
        raise RecipeError(f"Expected a program after `--`, but got {first!r}{remedy}.")
    script = parts.script if parts and not placeholders([parts.script]) else ""
    tokens = parts.program if parts else [t for t in command if not PYTHON.fullmatch(Path(t).name)]
    if ref is not None:
        commit = commit_named(ref, arm)
        check_paths(command, script, commit, arm)
        elsewhere = filter(os.path.isabs, named_files(tokens))
        return {f"@{ref}": commit, **{name: fingerprint(name) for name in elsewhere}}
    if script and not fingerprint(script):
        raise RecipeError(f"Expected a script that can be read after `--`, but got {script!r}.")
    program = Path(script) if script else parts.name if parts and not parts.script else None
    imported = imported_files(program) if program is not None else ()
    names = [script, *sorted(map(str, imported)), *named_files(tokens)]
    return {os.path.relpath(name): fingerprint(name) for name in names if name}


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
