"""Ahead-of-time compilation: each bfloat16 kernel for sm_90 at the sizes of the embedded model, against its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.aot import (
    SHARED_LIMIT,
    Usage,
    launches_of,
    matrix_instructions,
    mixed_instructions,
    operations,
    problems_of,
    unfenced_products,
    unguarded_products,
)
from kernels.launch import ARCHITECTURES, by_architecture, launch, recording
from kernels.linear import quantise
from kernels.linear.kernel import quantised_linear
from kernels.shapes import MODELS

CHECKOUT = Path(__file__).parents[2]


CHANGES = """
import json, sys
from kernels import aot
from kernels.segment_kernel import find_segment

table = json.loads((aot.FOLDER / "moe" / "aot.json").read_text())
first = aot.digest("moe", table) == aot.committed_digests().get("moe")  # before operations whose functions it calls
status = aot.main(["--quick"])
operation = "varlen_attention"
committed = aot.committed_digests()
table = json.loads((aot.FOLDER / operation / "aot.json").read_text())

def changed(table=table):
    for _, launched in aot.launches_of(operation, aot.QUICK_TARGET, [aot.QUICK_MODEL]):
        launched.kernel.hash = None
    return aot.digest(operation, table) != committed[operation]

same = not changed()
rows = {key: {**row, "registers": row["registers"] - 1} for key, row in table.items()}
different = {"row": changed(rows)}
find_segment._unsafe_update_src(find_segment.src + "\\n    pass")
different["called function"] = changed()
refused = aot.main(["--quick", "--op", operation])
print(json.dumps({"status": status, "first": first, "same": same, "refused": refused, **different}))
"""


def test_every_kernel_compiles_for_sm_90() -> None:
    """Those that have changed since their digest was written; then one that calls a changed function. In a separate
    process, since the interpreter has replaced the compiler in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", CHANGES], cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    *told, changed, found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row["op"] for row in told] == operations()
    assert not any(row["problems"] for row in told), ran.stderr[-4000:]
    assert found == {"status": 0, "first": True, "same": True, "row": True, "called function": True, "refused": 1}
    assert changed["compiled"] >= 1 and changed["problems"] == 1
    assert "varlen_attention: it has changed and compiles without a problem" in ran.stderr


LOADS = """
import json, re
from service.common.helper_process import torch_imports
with torch_imports():  # half of the time
    import torch
import triton
from kernels import aot

def loads(operation, case):
    key = f"{aot.QUICK_TARGET} {aot.QUICK_MODEL.name} {case}"
    launched = dict(aot.launches_of(operation, aot.QUICK_TARGET, [aot.QUICK_MODEL]))[key]
    source, options = aot._prepared(launched, aot.QUICK_TARGET)
    compiled = triton.compile(source, target=aot._target(aot.QUICK_TARGET)[0], options=options.__dict__).asm
    lines = compiled["ttgir"].splitlines()
    indents = [len(line) - len(line.lstrip()) for line in lines]
    waits = []
    for begin, line in enumerate(lines):
        if "scf.for" in line:
            end = next(i for i in range(begin + 1, len(lines)) if indents[i] == indents[begin])
            waits += re.findall(r"ttg.async_wait.*num = (\\d+)", "".join(lines[begin:end]))
    return [min(map(int, waits), default=0), len(re.findall(r"ld\\.global\\S*\\.[bsu]8 ", compiled["ptx"]))]

cases = {"paged_attention": ["decode write bfloat16 attend"]}
cases["linear"] = [f"{kind} 1 bfloat16 _linear_kernel" for kind in ("int8", "int4", "nvfp4")]
print(json.dumps({case: loads(operation, case) for operation in cases for case in cases[operation]}))
"""


def test_blocks_are_loaded_ahead_and_not_byte_by_byte() -> None:
    """In each iteration of these loops copies of later blocks stay in flight. Bytes of weights are copied 16 at a time;
    a few scales are loaded alone."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", LOADS], cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout)
    assert len(found) == 4
    assert {case: numbers for case, numbers in found.items() if numbers[0] < 1 or numbers[1] > 4} == {}


@pytest.mark.parametrize("operation", operations())
def test_tables_hold_every_target_and_model_without_spills(operation: str) -> None:
    table = json.loads((CHECKOUT / "kernels" / operation / "aot.json").read_text())
    assert {key.split()[0] for key in table} == set(ARCHITECTURES)
    assert {key.split()[1] for key in table} <= {shape.name for shape in MODELS}
    assert not [problem for key, row in table.items() for problem in problems_of(key, Usage(**row), row)]


def test_which_configurations_a_device_gets(caplog: pytest.LogCaptureFixture) -> None:
    """Unknown devices get those that need the least shared memory: 99 KiB on sm_89 and sm_120, as on sm_86."""
    plain = {name: name for name in ARCHITECTURES if name != "sm_86"}
    found = {}
    for name in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100"):
        with recording(name):
            found[name] = [
                by_architecture(table, torch.device("cuda")) for table in (plain, {**plain, "sm_86": "sm_86"})
            ]
    assert found == {
        "sm_80": ["sm_80", "sm_80"], "sm_86": ["sm_80", "sm_86"], "sm_89": ["sm_80", "sm_86"],
        "sm_90": ["sm_90", "sm_90"], "sm_100": ["sm_100", "sm_100"], "sm_120": ["sm_80", "sm_86"],
        "gfx942": ["gfx942", "gfx942"], "gfx1100": ["gfx942", "gfx942"],
    }  # fmt: skip
    warned = [record.args for record in caplog.records]
    assert warned == [("sm_89", "sm_86"), ("sm_120", "sm_86"), ("gfx1100", "gfx942")], "each once"


@pytest.mark.parametrize("operation", operations())
def test_tables_hold_every_case(operation: str) -> None:
    """Additions to a model's shape or to a folder's cases must be compiled before they are committed."""
    table = json.loads((CHECKOUT / "kernels" / operation / "aot.json").read_text())
    keys = {key for key, _ in launches_of(operation, "sm_90", MODELS)}
    assert keys == {key for key in table if key.startswith("sm_90 ")}


def test_configurations_with_different_matrix_instructions_are_a_problem() -> None:
    """The number of columns does not count; other targets and dtypes may use other instructions."""
    wide, narrow, small = (
        Usage(1, 0, 0, 4, 0, matrix_instructions(f"\t{name} {{%r1}};\n"))
        for name in (
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16",
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        )
    )
    plain = Usage(1, 0, 0, 4, 0, matrix_instructions("fma.rn.f32 %f1, %f2, %f3, %f4;"))
    found = {"sm_90 demo experts 4 bfloat16 _grouped": narrow, "sm_90 demo experts 4096 bfloat16 _grouped 2": wide}
    others = {"sm_80 demo experts 4 bfloat16 _grouped": small, "sm_90 demo experts 4 float32 _grouped": plain}
    assert mixed_instructions(found | others) == []
    for other in (small, plain):
        (problem,) = mixed_instructions(found | {"sm_90 demo experts 64 bfloat16 _grouped": other})
        assert problem.startswith("sm_90 _grouped of 16-bit rows: ") and problem.endswith("round differently")


@pytest.mark.parametrize(
    ("usage", "committed", "words"),
    [
        ({}, {}, []),
        ({"spills": 8}, {}, ["spills"]),
        ({"registers": 65}, {}, ["registers 65, 64"]),
        ({"shared": 2048}, {}, ["shared 2048, 1024"]),
        ({"shared": SHARED_LIMIT["gfx942"] + 1}, {"shared": 10**6}, ["limit"]),
        ({"unguarded": 1}, {}, ["1 products"]),
        ({}, None, ["not in the table"]),
    ],
)
def test_what_does_not_pass(usage: dict[str, int], committed: dict[str, Any] | None, words: list[str]) -> None:
    row = {"registers": 64, "spills": 0, "shared": 1024, "warps": 4}
    found = problems_of("gfx942 demo case kernel", Usage(**row | usage), None if committed is None else row | committed)
    assert len(found) == len(words) and all(word in problem for word, problem in zip(words, found))


PRODUCT = "%p = ttng.warp_group_dot %a, %b, %c {isAsync = true} : "
IN_REGISTERS, IN_MEMORY = "tensor<64x64xbf16> * !ttg.memdesc<64x64xbf16>", "!ttg.memdesc<64x64> * !ttg.memdesc<64x64>"


@pytest.mark.parametrize(
    ("product", "pending", "found"), [(IN_REGISTERS, 3, 1), (IN_REGISTERS, 0, 0), (IN_MEMORY, 3, 0)]
)
def test_products_whose_registers_are_written_while_they_run(product: str, pending: int, found: int) -> None:
    wait = f"%w = ttng.warp_group_dot_wait %p {{pendings = {pending} : i32}}"
    outside = "%o = ttng.warp_group_dot_wait %w {pendings = 0 : i32}"
    loop = ["  %r = scf.for %i = %0 to %n {", f"    {PRODUCT}{product}", f"    {wait}", "    scf.yield %w", "  }"]
    assert unguarded_products("\n".join([f"  {PRODUCT}{product}", *loop, f"  {outside}"])) == found


STORE, FENCE, BARRIER = "@%p1 st.shared.v4.b32 [%r1], {%r2};", "fence.proxy.async.shared::cta;", "bar.sync 0;"


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ([], 0),
        ([STORE, FENCE, BARRIER], 0),
        ([STORE, BARRIER, FENCE], 1),
        ([STORE, BARRIER, FENCE, BARRIER, FENCE], 0),
        ([STORE, FENCE, BARRIER, STORE, BARRIER, FENCE], 1),
    ],
)
def test_products_that_may_read_shared_memory_before_it_is_written(before: list[str], found: int) -> None:
    product = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, 0, 1, 1, 0, 0;"
    assert unfenced_products("\n".join(["\t" + line for line in [*before, product, product]])) == found


def test_recording_launches_nothing() -> None:
    with recording("sm_80") as launches:
        launch(None, (3,), n=1)
        launch(None, (3, 0), n=2)
    assert [(recorded.grid, recorded.arguments) for recorded in launches] == [((3,), {"n": 1})]


def test_a_grid_that_no_gpu_launches_is_refused() -> None:
    x, weight = torch.empty(65535 * 16 + 1, 64, device="meta"), quantise(torch.ones(64, 64), "int8").to("meta")
    with recording("sm_90") as launches:
        quantised_linear(x[:-1], weight, None)
        with pytest.raises(ValueError, match="_linear_kernel would need 65536 programs .* at most 65535"):
            quantised_linear(x, weight, None)
    assert [launched.grid for launched in launches] == [(4, 65535)]
