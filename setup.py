"""Builds the optional C kernel; everything else about the package is in pyproject.toml."""

import os
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNEL = "src/powergrad/kernels"


class BuildLibrary(build_ext):
    """The kernel is a library for ctypes and knows no Python: one file serves every version."""

    def get_ext_filename(self, fullname: str) -> str:
        """Its name, without the version that an extension module's has."""
        return os.path.join(*fullname.split(".")) + ".so"


class PlatformWheel(bdist_wheel):
    """Hence a wheel for the platform, and for any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tags in the wheel's name: Python, ABI, platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
    ext_modules=[
        Extension(
            "powergrad.kernels.kernel",
            sources=[f"{KERNEL}/kernel.c"],
            depends=[f"{KERNEL}/{name}.h" for name in ("exponentiate", "threads")],
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
    else [],
)
