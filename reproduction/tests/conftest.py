"""The settings of tests/conftest.py hold here too: threads, and the size of a run."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[2] / "tests" / "conftest.py"))
