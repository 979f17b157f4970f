"""The code of a user's program: the files and commits that identify it, and checkouts of commits.

What counts is the script, every module of the user's own that it imports, the Python files whose
names are in it, and the files named in the command. A module that is imported under a computed name
counts if it is in a package of which anything is imported. Installed packages and data do not.

A commit is written into the folder of a run with an index of its own, not with ``git worktree``:
nothing is registered in the user's repository, so nothing is left there when a run is killed, and
two studies cannot disturb each other. Unlike ``git archive``, this also writes files that are
marked as ``export-ignore``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from powergrad.lab.environment import git
from powergrad.lab.runs.jobs import RunFailed, digest
from powergrad.lab.signals import Interrupted, watching_signals
from powergrad.lab.trainer.recipe import RecipeError
from powergrad.lab.words import did_you_mean

LARGE = 100 << 20  # bytes; larger files are identified by their size and time
LENGTH = 16  # hexadecimal digits of a digest


def fingerprint(path: str | Path) -> str:
    """A key of the content of a file; empty if it cannot be read."""
    try:
        state = os.stat(path)
        if state.st_size > LARGE:
            return f"{state.st_size} bytes of {state.st_mtime_ns}"
        return digest(Path(path).read_bytes())[:LENGTH]
    except OSError:
        return ""


def named_files(tokens: Iterable[str]) -> Iterator[str]:
    """The files that some arguments name, also as ``--config=FILE``."""
    for token in tokens:
        for name in dict.fromkeys((token, token.partition("=")[2])):
            with contextlib.suppress(OSError, ValueError):
                if name and os.path.isfile(name):
                    yield name


def imported_files(program: Path | str) -> set[Path]:
    """A script or module (by its dotted name), and the user's own files that it imports."""
    here = Path.cwd()
    places = [here, Path(git("rev-parse", "--show-toplevel") or here)]
    places += [program.absolute().parent] if isinstance(program, Path) else []
    roots = {root for place in places for root in (place, place / "src")}
    seen, packages, found = set[str](), set[str](), set[Path]()

    def files_of(module: str) -> set[Path]:
        """The files of a module that was not seen: all of its package, or only its own."""
        files, package = set[Path](), module.partition(".")[0]
        for root in roots if module not in seen else ():
            if package not in packages and (root / package / "__init__.py").is_file():
                files |= {*(root / package).rglob("*.py")}
            own = root / module.replace(".", "/")
            files |= {own.with_suffix(".py"), own / "__main__.py"}
        seen.add(module)
        packages.add(package)
        return {path.resolve() for path in files if path.is_file()}

    waiting = {program.resolve()} if isinstance(program, Path) else files_of(program)
    while waiting:
        path = waiting.pop()
        found.add(path)
        modules, names = _names_in(path, path.stat().st_mtime_ns)
        waiting |= {file for module in modules for file in files_of(module)} - found
        named = {root / name for name in names for root in (*roots, path.parent)}
        waiting |= {file.resolve() for file in named if file.is_file()} - found
    return found


@functools.cache
def _names_in(path: Path, modified: int) -> tuple[set[str], set[str]]:
    """The modules that a file may import, and the Python files that its strings name."""
    modules, names, tree = set[str](), set[str](), ast.Module([], [])
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.ImportFrom):  # relative, such as in a folder without __init__.py
            near = [(node.module or alias.name).replace(".", "/") for alias in node.names]
            names |= {f"{'../' * (node.level - 1)}{name}.py" for name in near}
        elif isinstance(node, ast.Constant) and str(node.value).endswith(".py"):
            names.add(str(node.value))
    return modules, names


# Commits ------------------------------------------------------------------------------------------


def commit_named(ref: str, arm: str) -> str:
    """The commit of a git ref, for an arm."""
    if git("rev-parse", "--show-toplevel") is None:
        got = f"{str(Path.cwd())!r}, which is in no git repository"
        raise RecipeError(f"Expected a repository for the arm {arm!r} (@{ref}), but got {got}.")
    commit = git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if commit is None:
        known = (git("for-each-ref", "--format=%(refname:short)") or "").split()
        raise RecipeError(
            f"Expected the branch, tag or commit of the arm {arm!r} to exist in this repository, "
            f"but got @{ref}{did_you_mean(ref, known)}"
        )
    return commit


def check_paths(command: Sequence[str], script: str, commit: str, arm: str) -> None:
    """Check that a command executes the files of a commit, and not those of the user's tree."""
    for token in command:
        if os.path.isabs(token) and git("ls-files", "--error-unmatch", token) is not None:
            wanted = f"paths relative to the current folder, because the arm {arm!r} is of a commit"
            raise RecipeError(f"Expected {wanted}, but got {token!r}.")
    if script and not os.path.isabs(script):
        place = os.path.relpath(script)
        place = place if place.startswith("..") else f"./{place}"
        if git("cat-file", "-e", f"{commit}:{place}") is None:
            got = f"commit {commit[:12]}, which has no such file"
            raise RecipeError(
                f"Expected {script!r} in the commit of the arm {arm!r}, but got {got}."
            )


@contextlib.contextmanager
def checked_out(commit: str | None, folder: Path) -> Iterator[tuple[Path | None, dict[str, str]]]:
    """A temporary checkout, if there is a commit: the folder to start in, and variables."""
    if commit is None:
        yield None, {}
        return
    root = Path(git("rev-parse", "--show-toplevel") or Path.cwd())
    index, to = folder.with_suffix(".index"), f"--prefix={folder}/"
    with watching_signals(second_interrupts=False) as stopped:
        try:
            if git("read-tree", commit, index=index) is not None:
                git("checkout-index", "--all", to, cwd=root, index=index)
            directory = folder / Path.cwd().resolve().relative_to(root.resolve())
            if stopped():
                raise Interrupted("the run was stopped and will be repeated")
            if not directory.is_dir():
                what = f"the folder {str(Path.cwd())!r} of commit {commit[:12]}"
                raise RunFailed(f"{what} could not be checked out.")
            paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            paths = [path.replace(f"{root}/", f"{folder}/", 1) for path in paths if path]
            # An installed project must not shadow its own checkout.
            if (folder / "pyproject.toml").is_file() or (folder / "setup.py").is_file():
                paths = [str(folder), str(folder / "src"), *paths]
            yield directory, {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            index.unlink(missing_ok=True)
