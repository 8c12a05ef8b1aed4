"""The package's build step: kernels into `engine/_kernels.so`. Optional in effect: without a compiler the installation
goes on, and `engine.native` compiles at the first start or says what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools.command.build_ext import build_ext


class KernelBuild(build_ext):
    def run(self) -> None:
        # An isolated build loads this file by its path, with nothing of the project on the module path.
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        from csrc.build import BuildError, build, fingerprint, fingerprint_file

        root = Path() if self.inplace else Path(self.build_lib)
        library = root / "engine" / "_kernels.so"
        printed = fingerprint_file(library)
        if library.exists() and printed.exists() and printed.read_text() == fingerprint():
            return  # the second `pip install -e` of a checkout, for the tests' packages
        try:
            build(library)
        except BuildError as error:
            print(f"warning: the CPU kernels were not built: {error}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return []
