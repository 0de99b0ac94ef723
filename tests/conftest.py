"""Settings for every test: one thread, no network, the same random numbers each time."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import tempfile
from collections.abc import Iterator

# Set before torch, tokenizers and transformers are imported, because each reads its variable only once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Tests start some 200 Python processes: compiling the same sources in each of them took a tenth of the suite's time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch

if not torch.cuda.is_available():
    # Triton kernels run in its interpreter here. Triton reads this while a kernel is defined, and its own library is
    # made of kernels, so it has to be set before anything imports Triton. Programs that compile run without it.
    os.environ["TRITON_INTERPRET"] = "1"
from hypothesis import settings

GPU = torch.cuda.is_available()
sys.dont_write_bytecode = False  # each worker would compile all test modules again, for five seconds
# On again in `pytest_collection_finish`. Nearly all that is imported and collected until then lives until the end.
gc.disable()
torch.set_num_threads(1)

# Examples are the same in each run, so that a failure can be reproduced. There is no time limit: machines differ.
settings.register_profile("saccade", deadline=None, derandomize=True, database=None)
settings.load_profile("saccade")


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


@pytest.fixture(scope="session", autouse=True)
def temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers that tests kill cannot remove their temporary folders, so pytest does."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("tmp"))


@pytest.fixture(autouse=True)
def fixed_seeds() -> Iterator[None]:
    """Each test starts from the same generator state, whatever ran before it."""
    random.seed(0)
    if GPU:
        torch.manual_seed(0)
    else:  # the same without half a millisecond for stack traces, which torch keeps for devices that are not there
        torch.default_generator.manual_seed(0)
    yield
