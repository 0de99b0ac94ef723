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
import triton.language as tl
from torch import Tensor
from triton.language import semantic
from triton.runtime import interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOOR = (64 if DEVICE.type == "cuda" else 4) * 2.0**-24
"""Relative error that every kernel may have. On a GPU, sums are taken in another order than torch's and powers of two
are approximated, so a kernel in float32 may be less exact than torch by chance."""


def _mend() -> None:
    _mend_bfloat16()
    _mend_loops()
    # Sums and products of integers were computed four times over for an assertion that only a debug build makes.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _patch_once()
    _share_types()
    _convert_less()


def _mend_bfloat16() -> None:
    """Conversions from float32 round, and products are those of the numbers."""
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

    interpreter._convert_float, builder.create_dot = convert_float, create_dot


def _mend_loops() -> None:
    """Loops end at loaded numbers."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _patch_once() -> None:
    patch_language, patched, seen = interpreter._patch_lang, set(), set()

    def patch_lang(function: Any) -> Any:
        """Patches a language module for the first kernel that uses it, for good: doing it again for each launch took a
        tenth of the time, and a kernel's call of another one left it patched anyway."""
        if function not in seen:
            seen.add(function)
            modules = {value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core}
            if not modules <= patched:
                patch_language(function)
                patched.update(modules)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang


def _share_types() -> None:
    """Equal types and shapes are one object: most of the interpreter's time went into making and comparing them."""
    block_type, block_init = tl.core.block_type, tl.core.block_type.__init__
    blocks: dict[Any, Any] = {}
    np_type, np_types = interpreter._get_np_dtype, {}

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(type.sizes)

    @functools.cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def block_type_new(cls: Any, element_ty: Any, shape: Any) -> Any:
        given = shape.value if isinstance(shape, tl.constexpr) else shape
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in given])
        key = cls, element_ty.name, sizes
        if key not in blocks:
            made = blocks[key] = object.__new__(cls)
            block_init(made, element_ty, list(sizes))
            made.sizes = sizes
        return blocks[key]

    def get_np_dtype(of: Any) -> Any:
        name = of.scalar.name
        if name not in np_types:
            np_types[name] = np_type(of)
        return np_types[name]

    tl.core.dtype.sizes = ()
    tl.tensor.__init__ = tensor_init
    block_type.__new__, block_type.__init__ = block_type_new, lambda *_: None
    interpreter._get_np_dtype = get_np_dtype


def _convert_less() -> None:
    """Most operands have the same type, or are numbers beside others and pointers beside integers. Those are not
    converted, and blocks keep their values as they are, since NumPy's operations repeat them."""
    check = semantic.TritonSemantic.binary_op_type_checking_impl
    common, block_type = functools.cache(np.broadcast_shapes), tl.core.block_type
    constants: dict[tuple[str, float], Any] = {}

    def converted(self: Any, value: Any, like: Any) -> Any:
        """A number as a tensor of the other operand's type, or None if operations do not convert it to that."""
        if type(value) is tl.tensor or type(like) is not tl.tensor:
            return value if type(value) is tl.tensor else None
        dtype = like.dtype
        if type(value) is int and dtype.is_int() and not dtype.is_int1():
            fits = dtype.get_int_min_value() <= value <= dtype.get_int_max_value()
        else:
            fits = type(value) in (int, float) and dtype.is_floating()
        if fits and (dtype.name, value) not in constants:
            constants[dtype.name, value] = self.scalar_constant(value, dtype)
        return constants[dtype.name, value] if fits else None

    def shaped(operand: Any, sizes: tuple[int, ...]) -> Any:
        same = operand.type.sizes == sizes
        return operand if same else tl.tensor(operand.handle, block_type(operand.dtype, sizes))

    def check_types(self: Any, lhs: Any, rhs: Any, *given: bool) -> Any:
        left, right = converted(self, lhs, rhs), converted(self, rhs, lhs)
        if left is None or right is None:
            return check(self, lhs, rhs, *given)
        one, other = left.dtype, right.dtype
        divides = given[3:] == (True,) and one.is_floating()  # numbers of 16 bits are divided in float32
        moves = one.is_ptr() and other.is_int() and given[:1] == (True,)
        if not (moves or one.name == other.name and not one.is_ptr() and not divides):
            return check(self, lhs, rhs, *given)
        if left.type is right.type:
            return left, right
        sizes = common(left.type.sizes, right.type.sizes)
        return shaped(left, sizes), shaped(right, sizes)

    semantic.TritonSemantic.binary_op_type_checking_impl = check_types


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
