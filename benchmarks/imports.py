"""What `import powergrad` adds to `import torch`, in time.

    python benchmarks/imports.py [--rounds 21]      write results/bench_imports.csv

Each round is a new process, which imports one after the other; CPU time, medians.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median

import harness

PROGRAM = """
import time
begin = time.process_time()
import torch
between = time.process_time()
import powergrad
print(between - begin, time.process_time() - between)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    pairs = []
    for _ in range(rounds + 1):  # the first warms up the disk's cache
        run = [sys.executable, "-c", PROGRAM]
        out = subprocess.run(run, check=True, capture_output=True, text=True).stdout
        pairs.append([float(x) for x in out.split()])
    torch_ms, powergrad_ms = (1e3 * median(values) for values in zip(*pairs[1:], strict=True))
    row = {
        "rounds": rounds,
        "torch_ms": f"{torch_ms:.1f}",
        "powergrad_ms": f"{powergrad_ms:.1f}",
        "ratio": f"{powergrad_ms / torch_ms:.4f}",
    }
    print(row)
    harness.save("imports", [row])


if __name__ == "__main__":
    main()
