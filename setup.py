"""Builds the optional C kernel; everything else about the package is in pyproject.toml."""

import sys

from setuptools import Extension, setup

KERNEL = "src/powergrad/_native"

setup(
    ext_modules=[
        Extension(
            "powergrad._native.kernel",
            sources=[f"{KERNEL}/kernel.c", f"{KERNEL}/norms.c"],
            depends=[f"{KERNEL}/{name}.h" for name in ("exponentiate", "norms", "threads")],
            extra_compile_args=[
                "-std=c11",
                "-O3",
                "-fno-math-errno",
                "-ffp-contract=fast",  # a * b + c may be fused; nothing else is relaxed
                "-fopenmp-simd",  # obey `#pragma omp simd`; this is not OpenMP
                "-Wno-psabi",
            ],
            libraries=["m", "pthread"],
            optional=True,  # without a compiler the package installs and runs without it
        )
    ]
    if sys.platform != "win32"
    else []
)
