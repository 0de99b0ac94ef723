"""Builds saccade-server. The static metadata is in pyproject.toml; this file adds

- the version, which is that of the client, and the requirement of exactly this version of the client;
- with WITH_COMPILED_CODE=1 in the environment, compiled code for every instruction set of the compiler's architecture
  (`kernels/native/prebuilt.py`), which makes the wheel specific to this platform; with WITH_COMPILED_CODE=processor,
  only for the instruction sets that this processor has, which is enough to test the wheel on this machine. Without the
  variable the wheel fits any platform, and the code is compiled when it is first used.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))
WITH_COMPILED_CODE = os.environ.get("WITH_COMPILED_CODE") or "0"


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (HERE / "saccade" / "__init__.py").read_text("utf-8"), re.MULTILINE)
    assert found is not None, "saccade/__init__.py has no __version__"
    return found[1]


def import_prebuilt() -> ModuleType:
    if str(HERE) not in sys.path:  # a build front end may not have put this folder on the path
        sys.path.insert(0, str(HERE))
    return importlib.import_module("kernels.native.prebuilt")


class ServerDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether the wheel is specific to one platform."""
        return WITH_COMPILED_CODE != "0"


class BuildPackages(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """All modules of a package, except the programs in `demo` that train the embedded model."""
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if package != "demo" or module[1] == "__init__"]

    def run(self) -> None:
        super().run()
        if WITH_COMPILED_CODE != "0" and not self.editable_mode:
            prebuilt = import_prebuilt()
            features = prebuilt.processor_features() if WITH_COMPILED_CODE == "processor" else None
            prebuilt.build(Path(self.build_lib, "kernels", "native", prebuilt.FOLDER.name), features)


class BuildWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """(Python, ABI, platform): any Python 3, because compiled code is called through ctypes; the platform for which
        the compiler generates code."""
        platform = f"linux_{import_prebuilt().architecture()}" if WITH_COMPILED_CODE != "0" else "any"
        return "py3", "none", platform


if __name__ == "__main__":
    setup(
        version=version(),
        install_requires=[f"saccade=={version()}", *PROJECT["tool"]["saccade"]["dependencies"]],
        distclass=ServerDistribution,
        cmdclass={"build_py": BuildPackages, "bdist_wheel": BuildWheel},
    )
