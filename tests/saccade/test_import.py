"""Cost of `import saccade` in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import saccade

HEAVY = ["torch", "numpy", "PIL", "transformers", "tokenizers", "triton", "service", "encoder", "decoder", "kernels"]


def loaded(statement: str) -> tuple[set[str], float]:
    program = f"""
import json, sys, time
began = time.process_time()
{statement}
print(json.dumps([sorted(sys.modules), time.process_time() - began]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules, seconds = json.loads(done.stdout)
    return set(modules), seconds


def test_importing_it_is_cheap() -> None:
    # CPU time, because a busy machine stretches any other; the best of three, because the first reads the disk.
    runs = [loaded("import saccade") for _ in range(3)]
    assert not runs[0][0] & {*HEAVY, "grpc", "google.protobuf"}
    assert min(seconds for _, seconds in runs) < 0.150


@pytest.mark.parametrize("name", ["Client", "AsyncClient", "LocalClient"])
def test_naming_a_client_loads_nothing_heavy(name: str) -> None:
    modules, _ = loaded(f"import saccade; saccade.{name}; import saccade.cli")
    assert not modules & set(HEAVY)


def test_a_request_with_files_needs_no_numpy_and_no_pillow() -> None:
    modules, _ = loaded(
        "from saccade._core.requests import build_request; build_request('?', images=[b'x', sys.executable])"
    )
    assert not modules & set(HEAVY)


def test_its_names() -> None:
    assert set(saccade.__all__) <= set(dir(saccade))
    assert all(getattr(saccade, name) is not None for name in saccade.__all__)
    with pytest.raises(AttributeError, match="Clyent"):
        saccade.Clyent  # noqa: B018
