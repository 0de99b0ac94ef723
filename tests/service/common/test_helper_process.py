"""How long a starting helper process is waited for, and the errors if it does not become ready."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe

import pytest

from service.common.helper_process import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    META_FUNCTIONS,
    HelperFailed,
    restart_pause,
    torch_imports,
    until_ready,
)
from service.common.option import ConfigError

WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def test_a_process_that_does_not_get_ready_is_killed() -> None:
    near, _far = Pipe()
    with subprocess.Popen(WAITS, stdin=subprocess.PIPE) as process:
        with pytest.raises(HelperFailed, match=r"the engine process was not ready after 0\.2 seconds \(load_timeout\)"):
            until_ready(process, near, "first", 0.2, "engine")
        assert process.returncode == -9


def test_a_process_that_ends_before_it_is_ready_is_told_at_once() -> None:
    near, far = Pipe()
    far.close()
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        with pytest.raises(HelperFailed, match="the engine process ended with code 3 while starting"):
            until_ready(process, near, "first", 3600, "engine")


def test_what_a_ready_process_says_is_handed_on() -> None:
    near, far = Pipe()
    far.send(("ready", 1))
    with subprocess.Popen(WAITS, stdin=subprocess.PIPE) as process:
        assert until_ready(process, near, "first", 3600, "engine") == [1]
        assert far.recv() == "first" and process.poll() is None


def test_the_reason_of_a_process_that_cannot_start_is_an_error() -> None:
    near, far = Pipe()
    far.send(("failed", "max_len: 1 is too short"))
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        with pytest.raises(ConfigError, match="max_len: 1 is too short"):
            until_ready(process, near, "first", 3600, "engine")
        assert process.returncode == 0


def test_a_process_does_not_outlive_an_error_of_its_parent() -> None:
    near, _far = Pipe()
    with subprocess.Popen(WAITS, stdin=subprocess.PIPE) as process:
        with pytest.raises(AttributeError):
            until_ready(process, near, lambda: "no message", 3600, "engine")
        assert process.returncode == -9


@pytest.fixture(scope="module")
def frozen_again() -> Iterator[None]:
    """Garbage that a test has frozen is collected; then all is as conftest.py has left it."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def test_collections_of_garbage_look_at_no_object_of_an_import_and_go_on_after_it(frozen_again: None) -> None:
    with pytest.raises(ImportError), torch_imports():
        kept: list[object] = [[]]
        assert not gc.isenabled()
        raise ImportError("a package that cannot be imported")
    assert gc.isenabled() and not any(each is kept for each in gc.get_objects())


def test_torch_s_functions_for_tensors_without_data_are_imported_after_it_only(
    monkeypatch: pytest.MonkeyPatch, frozen_again: None
) -> None:
    """A later import gets the real module, which is kept if it is there already."""
    real = importlib.import_module(META_FUNCTIONS)
    assert real.__file__, "torch still has a module of this name"
    with torch_imports():
        assert importlib.import_module(META_FUNCTIONS) is real
    monkeypatch.delitem(sys.modules, META_FUNCTIONS)
    with torch_imports():
        assert not hasattr(importlib.import_module(META_FUNCTIONS), "__file__")
    assert META_FUNCTIONS not in sys.modules


def test_torch_for_gpus_is_imported_whole() -> None:
    program = """
from service.common.helper_process import torch_imports
with torch_imports():
    import torch
    torch.version.cuda = "13.0"
print(torch.Generator())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_helper_is_started_again_after_any_number_of_failures() -> None:
    pauses = [restart_pause(failures) for failures in (0, 1, 2, 100, 2000)]
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
