"""The part of the packaging that pyproject.toml cannot say: Bazel builds the shared library, which makes the wheel one of a platform."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).absolute().parent
LIBRARY = "xla_lamb/libxla_lamb.so"


class BuildWithLibrary(build_py):
    def run(self):
        super().run()
        # The headers come from the jaxlib of this build environment.
        subprocess.run(
            [str(ROOT / "tools/bazel.sh"), "build", "//xla_lamb:libxla_lamb.so"],
            env={**os.environ, "XLA_LAMB_PYTHON": sys.executable},
            check=True,
        )
        if not self.editable_mode:  # an editable install finds it in bazel-bin
            self.copy_file(str(ROOT / "bazel-bin" / LIBRARY), os.path.join(self.build_lib, LIBRARY), preserve_mode=False)


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        # Any Python 3: the library knows nothing of Python.
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel})
