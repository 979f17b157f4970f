"""The Triton kernels compiled for named GPUs, on a machine without one: `make test-triton`."""

from __future__ import annotations

import csv
import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces what is compiled here", allow_module_level=True)

from benchmarks import gpu_offline

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("kernel", ["statistics", "write"])
@pytest.mark.parametrize("architecture", gpu_offline.ARCHITECTURES)
def test_every_variant_compiles_without_spills(architecture, kernel):
    jobs = [job for job in gpu_offline.jobs([architecture]) if job[1] == kernel]
    with gpu_offline.OUT.open() as file:
        key = [architecture, kernel]
        recorded = [line for line in csv.DictReader(file) if [*line.values()][:2] == key]
    assert len(jobs) > 40
    for job, line in zip(jobs, recorded, strict=True):
        flags, row = job[3], gpu_offline.row_of(job)
        assert line == {name: str(value) for name, value in row.items()}
        elements, itemsize = row["elements_per_thread"], 4 if row["dtype"] == "float32" else 2
        assert row["spilled"] == 0, row
        assert row["registers"] <= 128, row
        assert row["wide_loads"] >= elements * itemsize // 16, row
        if row["classes"] != gpu_offline.LONG:  # a thread may hold several rows
            continue
        # Those of a row: two of its sums, two of its label, and p_target.
        of_rows = 4 + flags["CAP"] + flags["STATS"] if kernel == "statistics" else 0
        per_element = (2 if kernel == "statistics" else 1) + flags["CAP"]
        assert 0 <= row["exponentials"] - per_element * elements <= of_rows, row
        if kernel == "write":
            assert row["wide_stores"] == elements * itemsize // 16, row
