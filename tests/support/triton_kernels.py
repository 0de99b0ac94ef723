"""Shared by the tests of Triton kernels: memory that reveals unwritten results, and the error bound.

Without a GPU, kernels run in Triton's interpreter on CPU tensors (tests/conftest.py selects it before Triton is
imported). The interpreter of Triton 3.6 truncates bfloat16 where hardware rounds, multiplies the bits of bfloat16
matrices as integers, and cannot loop up to a loaded number (NumPy from 2.4 on does not convert an array of one element
to an integer); `_mend` corrects this.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from triton.language import semantic
from triton.runtime import interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOOR = (64 if DEVICE.type == "cuda" else 4) * 2.0**-24
"""Relative error that every kernel may have. On a GPU, sums are taken in another order than torch's and powers of two
are approximated, so a kernel in float32 may be less exact than torch by chance."""


def _mend() -> None:
    import triton.language as tl

    convert, builder = interpreter._convert_float, interpreter.InterpreterBuilder
    dot = builder.create_dot

    def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(values, dtype=np.float32)).bfloat16()
            return rounded.view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return np.asarray(values, dtype=np.uint32) << 16
        return convert(values, source, target, rounding)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = convert_float(handle.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch_language, patched = interpreter._patch_lang, set()

    def patch_lang(function: Any) -> Any:
        """Patches a language module for the first kernel that uses it, for good: doing it again for each launch took a
        tenth of the time, and a kernel's call of another one left it patched anyway."""
        modules = {value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core}
        if not modules <= patched:
            patch_language(function)
            patched.update(modules)
        return interpreter._LangPatchScope()

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape) if type.is_block() else ())

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        sizes = vars(lhs.type).get("sizes")  # only block types have it
        return (lhs, rhs) if sizes and sizes == vars(rhs.type).get("sizes") else broadcast(self, lhs, rhs)

    check = semantic.TritonSemantic.binary_op_type_checking_impl

    def check_types(self: Any, lhs: Any, rhs: Any, *given: bool) -> Any:
        divides = given[3:] == (True,)  # numbers of 16 bits are divided in float32
        if type(lhs) is type(rhs) is tl.tensor and not divides and lhs.dtype == rhs.dtype and not lhs.dtype.is_ptr():
            return broadcast_impl_value(self, lhs, rhs)
        return check(self, lhs, rhs, *given)

    block_init, np_type = tl.core.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}

    def block_type_init(self: Any, element_ty: Any, shape: Any) -> None:
        given = shape.value if isinstance(shape, tl.constexpr) else shape
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in given])
        key = (sizes, element_ty) if type(element_ty) is tl.dtype else None
        if key not in blocks:
            block_init(self, element_ty, list(sizes))
            vars(self)["sizes"] = sizes
            if key is not None:  # pointers are not hashable
                blocks[key] = dict(vars(self))
            return
        vars(self).update(blocks[key])

    np_types = functools.cache(np_type)

    def get_np_dtype(of: Any) -> Any:
        return np_types(of) if type(of) is tl.dtype else np_type(of) if of.scalar.is_ptr() else np_types(of.scalar)

    # Sums and products of integers were computed four times over for an assertion that only a debug build makes.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    # Types and shapes are values, and most of the interpreter's time went into making equal ones and comparing them.
    semantic.TritonSemantic.broadcast_impl_value = broadcast_impl_value
    semantic.TritonSemantic.binary_op_type_checking_impl = check_types
    tl.tensor.__init__, tl.core.block_type.__init__ = tensor_init, block_type_init
    interpreter._get_np_dtype = get_np_dtype
    interpreter._convert_float, builder.create_dot = convert_float, create_dot
    interpreter._patch_lang_tensor, interpreter._patch_lang = patch_lang_tensor, patch_lang


if not torch.cuda.is_available():
    _mend()


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, `torch.empty` and `empty_like` return NaN (the least integer for integers), so that elements a kernel
    does not write are detected."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(tensor: Tensor) -> Tensor:
        if tensor.dtype.is_floating_point:
            return tensor.fill_(float("nan"))
        return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).min)

    with (
        patch("torch.empty", lambda *args, **kwargs: fill(empty(*args, **kwargs))),
        patch("torch.empty_like", lambda *args, **kwargs: fill(empty_like(*args, **kwargs))),
    ):
        yield


def error(found: Tensor, exact: Tensor) -> float:
    """RMS of the difference divided by the RMS of `exact`."""
    difference = found.detach().cpu().double() - exact.detach().cpu().double()
    return float(difference.square().mean().sqrt() / exact.detach().cpu().double().square().mean().sqrt())


def assert_as_good(found: Tensor, exact: Tensor, plain: Tensor, name: str = "output") -> None:
    """A kernel's result may differ from the float64 result at most twice as much as `plain`, the same maths in torch in
    the kernel's dtype, plus a relative error of `FLOOR`."""
    assert found.isfinite().all(), f"{name} has values that are not finite"
    bound = 2 * error(plain, exact) + FLOOR
    assert error(found, exact) <= bound, f"{name}: error {error(found, exact):.3g}, allowed {bound:.3g}"
