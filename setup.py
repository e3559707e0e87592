"""The native decoder. Everything else is in pyproject.toml.

Where it can't be compiled the package installs without it and the engine computes with torch.
"""

from setuptools import Extension, setup

SOURCE = "engine/native/src"

setup(
    ext_modules=[
        Extension(
            # Not a module of Python's: a library with a C interface, loaded with ctypes.
            name="engine.native._decoder",
            sources=[
                f"{SOURCE}/{name}.cpp"
                for name in ("api", "kernels_portable", "kernels_avx2", "kernels_avx512")
            ],
            depends=[
                f"{SOURCE}/{name}"
                for name in (
                    "abi.h",
                    "codes.hpp",
                    "codes_avx2.hpp",
                    "codes_avx512.hpp",
                    "decoder.hpp",
                    "includes.hpp",
                    "model.hpp",
                    "numbers.hpp",
                    "panels.hpp",
                    "team.hpp",
                )
            ],
            language="c++",
            extra_compile_args=[
                "-std=c++20",
                "-O3",
                "-g0",
                "-fvisibility=hidden",
                # Whether a product and a sum become one operation must not depend on the code
                # around them: rows are promised to be equal to the last bit in any batch.
                "-ffp-contract=off",
                # GCC 12 warns about its own header of AVX-512.
                "-Wno-maybe-uninitialized",
                "-Wno-uninitialized",
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
