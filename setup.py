"""Builds saccade-server. Everything that a table can say is in pyproject.toml; this file adds

- the version, which is the client's, and the pin of the client to it;
- with WITH_COMPILED_CODE=1 in the environment, compiled code for every instruction set of the compiler's architecture
  (`kernels/native/prebuilt.py`), which makes the wheel one of this platform; with WITH_COMPILED_CODE=processor, for
  those of them that this processor has, which is enough to test it here. Without it the wheel serves any platform, and
  the code is compiled where it is first used.
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
    if str(HERE) not in sys.path:  # a build front end starts elsewhere
        sys.path.insert(0, str(HERE))
    return importlib.import_module("kernels.native.prebuilt")


class ServerDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether the wheel belongs to one platform."""
        return WITH_COMPILED_CODE != "0"


class BuildPackages(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """All modules; of `demo`, which holds the embedded model, not the programs that train it."""
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
        """Any Python 3, because compiled code is called through ctypes; the platform is the compiler's."""
        platform = f"linux_{import_prebuilt().architecture()}" if WITH_COMPILED_CODE != "0" else "any"
        return "py3", "none", platform


if __name__ == "__main__":
    setup(
        version=version(),
        install_requires=[f"saccade=={version()}", *PROJECT["tool"]["saccade"]["dependencies"]],
        distclass=ServerDistribution,
        cmdclass={"build_py": BuildPackages, "bdist_wheel": BuildWheel},
    )
