"""Settings for every test: one thread, no network, the same random numbers each time."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import tempfile
from collections.abc import Generator, Iterator

# Set before torch, tokenizers and transformers are imported, because each reads its variable only once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Tests start some 200 Python processes: compiling the same sources in each of them took a tenth of the suite's time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))):
    # As in `pytest_configure`, but before the conftest.py of a folder that is named on the command line, which pytest
    # imports first and which may import Triton. Asking torch would delay a process that only starts others.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

sys.dont_write_bytecode = False  # each worker would compile all test modules again, for five seconds
# On again in `pytest_collection_finish`. Nearly all that is imported and collected until then lives until the end.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process starts those that run tests, and they wait for it
    import torch
    from hypothesis import settings

    if not torch.cuda.is_available():
        # Triton kernels run in its interpreter here. Triton reads this while a kernel is defined, and its own library
        # is made of kernels, so it has to be set before anything imports Triton. Programs that compile run without it.
        os.environ["TRITON_INTERPRET"] = "1"
    # Examples are the same in each run, so that a failure can be reproduced. There is no time limit: machines differ.
    settings.register_profile("saccade", deadline=None, derandomize=True, database=None)
    settings.load_profile("saccade")


def worker_number(config: pytest.Config) -> int | None:
    """Of this process, if several run tests."""
    given: dict[str, str] | None = getattr(config, "workerinput", None)
    return None if given is None else int(given["workerid"].removeprefix("gw"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Every second worker imports test modules in the opposite order, so that of two workers each compiles half of
    them. In a new checkout this takes 6 s."""
    report = yield
    if isinstance(collector, pytest.Directory) and (worker_number(collector.config) or 0) % 2:
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if worker_number(config) is not None:  # they need the same order
        items.sort(key=lambda item: item.path.parts)


def pytest_collection_finish(session: pytest.Session) -> None:
    """From here on no collection of garbage looks at the modules and tests, of which there are enough to take a
    second.

    pytest adds two handlers to each logger that does not propagate, and removes them, three times a test. Torch has
    fifty, all below its logger "torch", through which the handlers get the same records."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test and its fixtures start with one thread, whatever ran before. An engine in this process sets the number
    for its own thread and for all threads that are started later."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers that tests kill cannot remove their temporary folders, so pytest does."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("tmp"))


@pytest.fixture(autouse=True)
def fixed_seeds() -> Iterator[None]:
    """Each test starts from the same generator state, whatever ran before it."""
    import torch

    random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # the same without half a millisecond for stack traces, which torch keeps for devices that are not there
        torch.default_generator.manual_seed(0)
    yield
