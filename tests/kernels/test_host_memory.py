"""Freed activations stay with the process if it asks for it."""

from __future__ import annotations

import mmap
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from resident import pages_in_memory

from kernels.host_memory import (
    HUGE,
    SHARED,
    buffer_memory,
    keep_freed_memory,
    use_huge_pages,
    weight_memory,
)
from kernels.linear.layouts import lay_out

PROGRAM = """
import resource
from service.common.helper_process import torch_imports
with torch_imports():  # half of the time
    import torch
from kernels.host_memory import keep_freed_memory
assert keep_freed_memory()
def layer():
    for width in (384, 1152, 384, 384, 1536, 1536, 384):
        kept = torch.ones(4136, width, dtype=torch.bfloat16)
for _ in range(12):
    layer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(12):
    layer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults() -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


def test_steps_settle_on_memory_that_is_already_there() -> None:
    if platform.libc_ver()[0] == "glibc":
        assert faults() < 100
    else:
        assert keep_freed_memory() is False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux which pages are in memory")
def test_a_buffer_takes_memory_as_far_as_it_is_written() -> None:
    """Even if the C allocator has freed memory of the same size, which `torch.empty` might return."""
    freed = torch.ones(3000, mmap.PAGESIZE // 4)
    del freed
    buffer = buffer_memory((3000, mmap.PAGESIZE // 4), torch.float32)
    assert pages_in_memory(buffer) == 0
    buffer[:1000] = 1
    assert pages_in_memory(buffer) in (1000, 1024)  # 1024: two huge pages
    assert buffer_memory((0, 5), torch.float32).shape == (0, 5)


RELEASING = """
import ctypes, mmap, sys
from service.common.helper_process import torch_imports
with torch_imports():  # half of the time
    import torch
from kernels.host_memory import release_program_pages

def file_bytes():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssFile"))

file = open(sys.argv[1], "rb")
own = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
own[:5] = b"wrote"
address = torch.frombuffer(own, dtype=torch.uint8).data_ptr()
assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(own)), 1)
before = file_bytes()
assert release_program_pages() > 100 << 20
print(before, file_bytes())
assert own[:10] == b"wrotefile-", "it has lost what was written to it"
rows = torch.arange(6.0).view(2, 3)
assert (rows @ rows.T).tolist() == [[5, 14], [14, 50]] and torch.ops.aten.add(1, 2) == 3
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_pages_of_libraries_are_released_but_none_that_was_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"file-" * 5000)
    done = subprocess.run(
        [sys.executable, "-c", RELEASING, str(tmp_path / "file")], capture_output=True, text=True, timeout=60
    )
    assert not done.returncode, done.stderr
    before, after = map(int, done.stdout.split())
    assert after < 0.3 * before


def advised(address: int) -> bool:
    """Whether the mapping of an address is marked for huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return " hg" in line
    return False


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has this advice")


@linux
def test_large_weights_lie_in_huge_pages_and_are_what_they_were() -> None:
    weight = torch.randn(1031, 8202).bfloat16()
    data = lay_out(weight, torch.bfloat16, compact=False).data
    assert data.nbytes > SHARED // 2, "it shares its mapping, and begins wherever the last one ended"
    assert data.data_ptr() % HUGE == 0 and advised(data.data_ptr())
    panels = torch.nn.functional.pad(weight, (0, 0, 0, -1031 % 64)).view(-1, 64, 4101, 2).transpose(1, 2)
    assert torch.equal(data, panels)


@linux
def test_no_more_is_taken_than_a_tensor_fills() -> None:
    own = mmap.mmap(-1, 4 * HUGE + HUGE // 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # nothing was freed there
    tensor = torch.frombuffer(own, dtype=torch.uint8)
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    assert use_huge_pages(tensor)
    first, behind = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
    assert advised(first) and advised(behind - 1)
    assert (first == begin or not advised(begin)) and (behind == end or not advised(end - 1))
    assert not use_huge_pages(torch.ones(100))


def test_small_weights_share_a_mapping_without_touching_each_other() -> None:
    sizes = [(3,), (5, 7), (1,), (64, 33)] * 50
    kept = [weight_memory(size, torch.bfloat16) for size in sizes]
    for number, tensor in enumerate(kept):
        assert tensor.shape == sizes[number % len(sizes)] and tensor.data_ptr() % 64 == 0 and not tensor.any()
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(kept))
    assert max(t.data_ptr() for t in kept) - min(t.data_ptr() for t in kept) < 2 * SHARED
