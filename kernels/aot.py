"""Compiles every Triton kernel for several GPU architectures without a GPU, and compares with the committed tables.

    python -m kernels.aot [--op NAME ...] [--target sm_90 ...] [--model NAME ...] [--quick] [--update]

Each folder with a `kernel.py` has a `cases.py` with `cases(shape)`: named calls of its operations on meta tensors, with
the sizes of a model (`kernels.shapes`). Their launches are compiled for each target. Registers and spills are read with
`cuobjdump`, which the Triton package includes, or, for gfx targets, from the metadata in the assembly. The table of
each folder is `aot.json`. The exit status is 1 if a kernel spills, needs more shared memory than the limit, or has a
product whose operands may be overwritten while it runs (`unguarded_products`, `unfenced_products`), if a product whose
results must not depend on the number of rows uses several matrix instructions (`mixed_instructions`), and if a row is
missing or worse than the committed one. TRITON_INTERPRET must be unset.

`--quick`, which the tests run, compiles only operations whose `digest` is not the committed one: `aot_digests.json` has
those of their last compilation without a problem, which `--update` writes, and the compiler's version. With another
compiler, all are compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels.launch import ARCHITECTURES, Launch, recording
from kernels.shapes import DEMO, MODELS, ModelShape

FOLDER = Path(__file__).parent

DIGESTS = FOLDER / "aot_digests.json"
QUICK_TARGET, QUICK_MODEL = "sm_90", replace(DEMO, dtypes=(torch.bfloat16,))
"""What `--quick` compiles for."""
SHARED_LIMIT = {
    "sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024,
}  # fmt: skip
"""Limit on shared memory per block, in bytes."""
ALIKE = ("linear", "moe")
"""Operations that give a row the same bits whatever the number of rows."""


@dataclass(frozen=True)
class Usage:
    """Resources of one compiled kernel."""

    registers: int
    spills: int
    """Bytes of local memory per thread (NVIDIA), or number of spilled registers (AMD)."""
    shared: int
    """Shared memory per block, in bytes."""
    warps: int
    unguarded: int = 0
    """Sum of `unguarded_products` and `unfenced_products`."""
    instructions: frozenset[str] = frozenset()
    """`matrix_instructions`; not in the tables."""

    @property
    def row(self) -> dict[str, int]:
        """What the tables have."""
        return {name: value for name, value in asdict(self).items() if name != "instructions"}


def operations() -> list[str]:
    """Folders with a kernel."""
    return sorted(path.parent.name for path in FOLDER.glob("*/kernel.py"))


def _target(name: str) -> tuple[Any, Any]:
    """Triton's target and backend."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    target = GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[3:]), 32)
    return target, make_backend(target)


def _prepared(launched: Launch, target_name: str) -> tuple[Any, Any]:
    """What Triton compiles for a recorded launch, as for a real one: source and options."""
    from triton.compiler import ASTSource
    from triton.runtime.jit import create_function_from_signature

    kernel, backend = launched.kernel, _target(target_name)[1]
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialisation, options = bind(**launched.arguments)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, dict(launched.arguments), bound, specialisation, options
    )
    return ASTSource(kernel, signature, constants, attributes), parsed


def compile_launch(launched: Launch, target_name: str) -> Usage:
    """Compiles one recorded launch with the same specialisation and options as a real launch."""
    import triton

    source, options = _prepared(launched, target_name)
    compiled = triton.compile(source, target=_target(target_name)[0], options=options.__dict__)
    amd = target_name.startswith("gfx")
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    registers, spills = _amd_registers(compiled.asm["amdgcn"]) if amd else _registers(compiled.asm["cubin"])
    unguarded = 0 if amd else unguarded_products(compiled.asm["ttgir"]) + unfenced_products(compiled.asm["ptx"])
    instructions = matrix_instructions(compiled.asm["amdgcn" if amd else "ptx"])
    return Usage(registers, spills, shared, warps, unguarded, instructions)


def matrix_instructions(assembly: str) -> frozenset[str]:
    """The matrix instructions in PTX or in AMD's assembly. NVIDIA's are named without their number of columns, which
    changes no sum."""
    found = re.findall(r"wgmma\.mma_async[\w.:]*|mma\.sync[\w.]*|tcgen05\.mma\.[\w.:]*|v_mfma_\w+", assembly)
    return frozenset(re.sub(r"(\.m\d+)n\d+(k\d+)", r"\1\2", name) for name in found)


def mixed_instructions(found: Mapping[str, Usage]) -> list[str]:
    """Problems of kernels that use different matrix instructions for the same target and dtype: instructions differ in
    how they round sums, so a row's bits would depend on the configuration that the number of rows chooses."""
    used: dict[str, set[str]] = {}
    for key, usage in found.items():
        target, kernel = key.split()[0], re.sub(r" \d+$", "", key).split()[-1]
        dtype = "float32" if " float32 " in key else "16-bit"
        kinds = ", ".join(sorted(usage.instructions)) or "multiply-adds"
        used.setdefault(f"{target} {kernel} of {dtype} rows", set()).add(kinds)
    return [
        f"{name}: {' and '.join(sorted(kinds))} round differently" for name, kinds in used.items() if len(kinds) > 1
    ]


def unfenced_products(ptx: str) -> int:
    """Number of asynchronous products (wgmma, sm_90) after stores to shared memory that were not fenced before a
    barrier. If the product reads what was stored, it may read old values: `kernels.fence_kernel` has the reason and
    the remedy."""
    found, stored, fenced = 0, False, False
    for line in ptx.splitlines():
        instruction = re.sub(r"^@!?%p\d+\s+", "", line.strip())
        if instruction.startswith(("st.shared", "stmatrix")):
            stored, fenced = True, False
        elif instruction.startswith("fence.proxy.async"):
            fenced = stored
        elif instruction.startswith("bar.sync") and fenced:
            stored = fenced = False
        elif instruction.startswith("wgmma.mma_async") and stored:
            found += 1
            stored = False
    return found


def unguarded_products(ttgir: str) -> int:
    """Number of asynchronous products (wgmma, sm_90) in a loop that read their left operand from registers, where the
    loop never waits for all products to end. The next iteration then writes registers that the hardware may still be
    reading, and whole rows of the result are wrong. Triton 3.6 generates such code for pipelined loops whose left
    operand is computed from loaded values. To avoid it, use one stage, or pass the left operand as it was loaded."""
    lines = ttgir.splitlines()
    depths = [len(line) - len(line.lstrip()) for line in lines]
    found = 0
    for index, line in enumerate(lines):
        if not re.search(r"ttng\.warp_group_dot .*isAsync = true.*? : tensor<", line):
            continue
        above = (
            i for i in range(index, -1, -1) if depths[i] < depths[index] and re.search(r"scf\.(for|while)", lines[i])
        )
        begin = next(above, None)
        if begin is None:
            continue
        end = next(i for i in range(index, len(lines)) if depths[i] == depths[begin])
        found += not any("warp_group_dot_wait" in inside and "pendings = 0" in inside for inside in lines[begin:end])
    return found


def _registers(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) per thread, as `cuobjdump` reports them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", told)
    assert found is not None, f"cuobjdump said {told!r}"
    return int(found[1]), int(found[2]) + int(found[3])


def _amd_registers(assembly: str) -> tuple[int, int]:
    notes = {name: int(number) for name, number in re.findall(r"\.([vs]gpr(?:_spill)?_count):\s+(\d+)", assembly)}
    return notes["vgpr_count"], notes["vgpr_spill_count"] + notes["sgpr_spill_count"]


def launches_of(operation: str, target: str, models: Sequence[ModelShape]) -> Iterator[tuple[str, Launch]]:
    """`(key, launch)` of every kernel that the operation launches, such as `sm_90 demo decode _kernel`. A kernel that a
    case launches twice in different forms is numbered from the second on."""
    module = importlib.import_module(f"kernels.{operation}.cases")
    for shape in models:
        for case in module.cases(shape):
            with recording(target) as launches:
                case.call()
            assert launches, f"case {case.name} of {operation} launches nothing"
            seen: dict[str, int] = {}
            for launched in launches:
                name = launched.kernel.__name__
                seen[name] = seen.get(name, 0) + 1
                number = f" {seen[name]}" if seen[name] > 1 else ""
                yield f"{target} {shape.name} {case.name} {name}{number}", launched


def rows_of(operation: str, targets: Sequence[str], models: Sequence[ModelShape]) -> Iterator[tuple[str, Usage]]:
    """`(key, usage)` of every kernel that the operation launches."""
    for target in targets:
        for key, launched in launches_of(operation, target, models):
            yield key, compile_launch(launched, target)


def compiler() -> str:
    """Versions and settings of the compiler for NVIDIA GPUs."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars

    backend = _target(QUICK_TARGET)[1]
    return f"Triton {triton.__version__}, {backend.hash()}, {sorted(get_cache_invalidating_env_vars().items())}"


def digest(operation: str, table: Mapping[str, dict[str, Any]]) -> str:
    """Digest of all that the result of `--quick` for the operation depends on, except the `compiler`: of each launch
    what Triton's own cache has in its keys (the kernel's source and that of all functions which it calls, types,
    constants, options) and its row in the table; and of this file."""
    parts: list[Any] = [Path(__file__).read_text()]
    for key, launched in launches_of(operation, QUICK_TARGET, [QUICK_MODEL]):
        # A kernel's hash has the constants that its functions take from their modules only if the functions were hashed
        # before, as for another operation.
        assert launched.kernel.cache_key
        launched.kernel.hash = None
        source, options = _prepared(launched, QUICK_TARGET)
        parts.append([key, source.hash(), options.hash(), table.get(key)])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def committed_digests() -> dict[str, str]:
    """Operation -> `digest` of its last compilation without a problem; empty if that was by another `compiler`."""
    digests: dict[str, str] = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    return digests if digests.get("compiler") == compiler() else {}


def problems_of(key: str, usage: Usage, committed: dict[str, Any] | None) -> list[str]:
    """Reasons why a row fails; `committed` is its row in the table, if it has one."""
    found = []
    limit = SHARED_LIMIT[key.split()[0]]
    if usage.spills:
        found.append(f"{key}: spills ({usage.spills})")
    if usage.unguarded:
        found.append(f"{key}: {usage.unguarded} products may read registers or shared memory that is being written")
    if usage.shared > limit:
        found.append(f"{key}: {usage.shared} bytes of shared memory, limit {limit}")
    if committed is None:
        found.append(f"{key}: not in the table (--update writes it)")
    else:
        found += [
            f"{key}: {name} {getattr(usage, name)}, {committed[name]} in the table"
            for name in ("registers", "shared")
            if getattr(usage, name) > committed[name]
        ]
    return found


def check(operation: str, targets: Sequence[str], models: Sequence[ModelShape], *, quick: bool, update: bool) -> int:
    """Compiles, prints and compares one operation. Returns the number of problems."""
    path = FOLDER / operation / "aot.json"
    table: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    complete = not quick and set(targets) == set(ARCHITECTURES) and set(models) == set(MODELS)
    digests = committed_digests()
    if quick and not update and digests.get(operation) == digest(operation, table):
        print(json.dumps({"op": operation, "compiled": 0, "problems": 0}))
        return 0
    found: dict[str, Usage] = {}
    problems = []
    for key, usage in rows_of(operation, targets, models):
        found[key] = usage
        print(f"{operation:24} {key:72} {usage.registers:4} registers {usage.shared:7} shared", file=sys.stderr)
        problems += problems_of(key, usage, usage.row if update else table.get(key))
    if operation in ALIKE:
        problems += mixed_instructions(found)
    if complete and not update:
        problems += [
            f"{key}: in the table, but no longer compiled (--update removes it)" for key in table.keys() - found.keys()
        ]
    if quick and digests and not update and not problems:
        problems.append("it has changed and compiles without a problem (--quick --update writes its digest)")
    if update:
        kept = {} if complete else table
        rows = sorted((kept | {key: usage.row for key, usage in found.items()}).items())
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in rows)
        path.write_text(f"{{\n{lines}\n}}\n")
        if not problems and QUICK_TARGET in targets and (quick or DEMO in models):
            digests |= {"compiler": compiler(), operation: digest(operation, json.loads(path.read_text()))}
            DIGESTS.write_text(json.dumps(digests, indent=2, sort_keys=True) + "\n")
    for problem in problems:
        print(f"{operation}: {problem}", file=sys.stderr)
    print(json.dumps({"op": operation, "compiled": len(found), "problems": len(problems)}))
    return len(problems)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=__doc__.split("\n\n")[0])
    parser.add_argument("--op", nargs="+", choices=operations(), default=operations())
    parser.add_argument("--target", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--model", nargs="+", choices=[shape.name for shape in MODELS])
    parser.add_argument(
        "--quick", action="store_true",
        help="compile operations that have changed, for the embedded model in bfloat16 on sm_90, as the tests do",
    )  # fmt: skip
    parser.add_argument("--update", action="store_true", help="write the tables; other problems still fail")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    targets = [QUICK_TARGET] if options.quick else options.target
    models = [shape for shape in MODELS if options.model is None or shape.name in options.model]
    models = [QUICK_MODEL] if options.quick else models
    return int(sum(check(op, targets, models, quick=options.quick, update=options.update) for op in options.op) > 0)


if __name__ == "__main__":
    sys.exit(main())
