"""Compile the Triton kernels for named GPUs, on a machine without one.

    python benchmarks/gpu_offline.py [--quick]       write results/gpu_offline.csv

For each architecture, kernel, variant and dtype, at the tile that `kernels.gpu.tile` chooses for
that many classes: the registers, shared memory and spilled bytes of a thread or program, and, of
NVIDIA's code, 128-bit loads and stores and the exponentials per element. Triton brings the tools
(`cuobjdump -res-usage`, `nvdisasm`); for AMD, its assembler listing says the same. Nothing is run:
the numbers are properties of the compiled code, not measurements on a GPU.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import csv
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from powergrad.kernels import gpu

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
DTYPES = {"float32": ("fp32", 4), "bfloat16": ("bf16", 2), "float16": ("fp16", 2)}
LONG, SHORT = 128000, 1000  # classes: rows of many tiles, and tiles of several rows
OUT = Path(__file__).parent.parent / "results" / "gpu_offline.csv"

FLOATS = ("w", "alphas", "g", "z_factor", "losses", "kept", "stats", "up")
INTEGERS = ("N", "C", *(f"stride_{n}" for n in ("n", "c", "y", "yc", "a", "g", "up", "grad")))
ALIGNED = ("x", "y", "w", "kept", "grad", "C", "stride_n", "stride_y", "stride_grad")
OF_ROWS = ("ALPHAS", "G", "Z_FACTOR")  # no value per element depends on them


def variants() -> Iterator[tuple[str, dict[str, bool]]]:
    """Every combination of the options that change what is done with an element.

    What changes only the work per row (one alpha per row, row weights, a factor of the z-loss) is
    on in the variants with class weights, and off in the others.
    """
    for target, weight, cap, stats in itertools.product(
        ("labels", "smoothed", "probabilities"), (False, True), (False, True), (False, True)
    ):
        flags = {
            "SOFT": target == "probabilities",
            "SMOOTH": target == "smoothed",
            "WEIGHT": weight,
            "CAP": cap,
            "STATS": stats,
            **dict.fromkeys(OF_ROWS, weight),
        }
        parts = [target, "weights" * weight, "cap" * cap, "statistics" * stats]
        yield " ".join(filter(None, parts)), flags


def jobs(architectures: Sequence[str] = ARCHITECTURES) -> Iterator[tuple[Any, ...]]:
    """Every variant for long rows, and for short ones the simplest and the largest."""
    for arch, (name, flags), dtype in itertools.product(architectures, variants(), DTYPES):
        extreme = name == "labels" or (flags["WEIGHT"] and flags["CAP"])
        for classes in (LONG, SHORT) if extreme else (LONG,):
            yield arch, "statistics", name, flags, dtype, classes
            if not flags["STATS"]:
                yield arch, "write", name, flags, dtype, classes


def compiled(
    arch: str, kernel: str, flags: dict[str, bool], dtype: str, classes: int
) -> tuple[Any, gpu.Tile, int]:
    """The compiled kernel, its tile, and the lanes of a warp."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    amd = arch.startswith("gfx")
    lanes = 64 if amd else 32
    target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch[3:]), 32)
    kind, itemsize = DTYPES[dtype]
    function = getattr(gpu.kernels(), kernel)
    live = gpu.live_values(flags, kernel == "write")
    tile = gpu.tile(classes, itemsize, live, lanes)
    constants = {**flags, "R": tile.rows, "BLOCK": tile.classes, "stride_c": 1}
    constants |= {"stride_yc": 1} if flags["SOFT"] else {}
    constants = {name: constants[name] for name in function.arg_names if name in constants}
    types = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(INTEGERS, "i32")
    types |= {"x": f"*{kind}", "grad": f"*{kind}", "y": "*fp32" if flags["SOFT"] else "*i64"}
    types["ignore_index"] = "i32"
    signature = {n: types.get(n, "fp32") for n in function.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (k,): [["tt.divisibility", 16]] for k, n in enumerate(function.arg_names) if n in ALIGNED
    }
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=aligned)
    options = gpu.compiler_options(tile, nvidia=not amd)
    return triton.compile(source, target=target, options=options), tile, lanes


def tool(name: str, cubin: bytes, *options: str) -> str:
    """The output of one of Triton's tools for a cubin."""
    import triton

    path = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def properties(compiled: Any, arch: str) -> dict[str, Any]:
    """Registers, shared memory and spills; loads, stores and exponentials of a thread."""
    shared = compiled.metadata.shared
    if arch.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        count = {n: int(v) for n, v in re.findall(r"\.(\w+):\s+(\d+)", text)}
        spilled = count["vgpr_spill_count"] + count["sgpr_spill_count"]
        return {
            "registers": count["vgpr_count"],
            "shared_bytes": shared,
            "spilled": spilled + count["private_segment_fixed_size"],
            "wide_loads": len(re.findall(r"(?:global|buffer)_load_dwordx4", text)),
            "wide_stores": len(re.findall(r"(?:global|buffer)_store_dwordx4", text)),
            "exponentials": len(re.findall(r"v_exp_f32", text)),
        }
    cubin = compiled.asm["cubin"]
    usage = tool("cuobjdump", cubin, "-res-usage")
    count = {n: int(v) for n, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    text = tool("nvdisasm", cubin, "-c")
    return {
        "registers": count["REG"],
        "shared_bytes": shared,
        "spilled": count["STACK"] + count["LOCAL"],
        "wide_loads": len(re.findall(r"LDG\.E[\w.]*\.128", text)),
        "wide_stores": len(re.findall(r"STG\.E[\w.]*\.128", text)),
        "exponentials": len(re.findall(r"MUFU\.EX2", text)),
    }


def row_of(job: tuple[Any, ...]) -> dict[str, Any]:
    arch, kernel, variant, flags, dtype, classes = job
    result, tile, lanes = compiled(arch, kernel, flags, dtype, classes)
    elements = tile.rows * tile.classes // (lanes * tile.warps)
    return {
        "architecture": arch,
        "kernel": kernel,
        "variant": variant,
        "dtype": dtype,
        "classes": classes,
        "tile_rows": tile.rows,
        "tile_classes": tile.classes,
        "warps": tile.warps,
        "elements_per_thread": elements,
        **properties(result, arch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two architectures; write nothing")
    quick = parser.parse_args().quick
    os.environ.pop("TRITON_INTERPRET", None)
    chosen = ("sm_90", "gfx942") if quick else ARCHITECTURES
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(row_of, jobs(chosen), chunksize=8))
    if not quick:
        with OUT.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    print(f"{len(rows)} kernels, {sum(row['spilled'] > 0 for row in rows)} with spills")


if __name__ == "__main__":
    main()
