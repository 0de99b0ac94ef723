"""A simulated GPU: tensors that report a CUDA device, and graphs that are captured and replayed.

Inside `pretended()`, a tensor made on "cuda" is a `GpuTensor`: it reports that device, and its values are in host
memory. What a real GPU refuses is refused: an operation on tensors of both devices, a kernel with a host tensor; and,
during a capture, everything that waits for the device, copies between it and pageable memory, or depends on a value.

A captured graph is the list of operations and launches that were made. A replay makes them again on the same memory,
whatever has changed in the caller's Python, as a real graph keeps addresses and numbers. Memory that a capture
allocated is filled with NaN before each replay, because between replays a pool's memory belongs to other graphs.

A non-blocking copy to the host arrives only when the host waits. Kernels run in Triton's interpreter.

Work is done in the order of the calls, but two streams count as unordered unless an event or a wait orders them: an
operation that uses memory last written, used or allocated by an unordered stream is refused. One thread only.

There is one GPU, which need not be the first one: the current device is device 0 unless something sets another one, and
a kernel that is launched while another device than its tensors' is current is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import triton_kernels  # noqa: F401  mends the interpreter
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from triton.runtime import interpreter

GPU = torch.device("cuda:0")
CUDA, META = 1, 14
"""Numbers of the two device types in torch's table of guards."""
aten = torch.ops.aten
CROSSES = {aten.copy_.default, aten._to_copy.default}
"""Operations that accept tensors of both devices."""
WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.item.default, aten._unique2.default, aten.is_nonzero.default,
}  # fmt: skip


class GpuTensor(Tensor):
    """`inner` holds the values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> GpuTensor:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=GPU,
        )  # type: ignore[attr-defined]  # fmt: skip
        made.inner = inner
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({self.inner})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        _wait()
        return self.inner.tolist()

    def record_stream(self, stream: Any) -> None:
        _order.recorded.add((self.inner.untyped_storage().data_ptr(), stream.number))

    # torch converts a list of indices to a tensor internally, where this class does not see it.
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_places(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_places(index), value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return perform(func, args, kwargs or {})


def _places(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_places(part) for part in index)
    if not isinstance(index, list):
        return index
    return torch.tensor(index, device=GPU) if index else torch.empty(0, dtype=torch.int64, device=GPU)


Clock = dict[int, int]
"""Stream -> number of its operations that are known to be finished."""


def _later(one: Clock, other: Clock) -> None:
    """Merges `other` into `one`: the later of both entries for each stream."""
    for stream, count in other.items():
        one[stream] = max(one.get(stream, 0), count)


class Order:
    """Who has used which memory, as vector clocks of streams. A use must be ordered after all writes, a write after all
    uses."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self.current: list[_Stream] = [_Stream()]
        self.writes: dict[int, Clock] = {}
        """Address of a storage -> the clock that a use must include. Allocation counts as a write, because the previous
        owner may still be using the memory."""
        self.uses: dict[int, Clock] = {}
        self.recorded: set[tuple[int, int]] = set()
        """(address, stream) pairs reported to the allocator (`record_stream`)."""

    def use(self, read: Iterable[Tensor], written: Iterable[Tensor], fresh: Iterable[Tensor]) -> None:
        """Records an operation of the current stream. Raises RuntimeError if it is not ordered after operations of
        other streams."""
        stream = self.current[-1]
        _later(stream.clock, self.host)
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        now = {stream.number: stream.clock[stream.number]}
        addresses = {tensor.untyped_storage().data_ptr() for tensor in read}
        targets = {tensor.untyped_storage().data_ptr() for tensor in written}
        for address in addresses | targets:
            self._knows(stream, self.writes.get(address, {}), "written")
            _later(self.uses.setdefault(address, {}), now)
        for address in targets:
            self._knows(stream, self.uses[address], "used")
            self.writes[address] = dict(now)
        for tensor in fresh:
            address = tensor.untyped_storage().data_ptr()
            self.writes[address], self.uses[address] = dict(now), dict(now)

    @staticmethod
    def _knows(stream: _Stream, needed: Clock, what: str) -> None:
        for other, count in needed.items():
            if stream.clock.get(other, 0) < count:
                raise RuntimeError(f"stream {stream.number} uses what stream {other} has {what}, behind no event")

    def wait(self) -> None:
        """The host waits for the current stream."""
        _later(self.host, self.current[-1].clock)

    def wait_all(self) -> None:
        for stream in _Stream.made:
            _later(self.host, stream.clock)


class Capture:
    """A captured graph: calls, in order, on the memory that they were made on."""

    running: ClassVar[Capture | None] = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.allocated: list[Tensor] = []
        self.touched: dict[int, Tensor] = {}

    def replay(self) -> None:
        _order.use((), self.touched.values(), ())
        for tensor in self.allocated:
            scramble(tensor)
        for call in self.calls:
            call()

    def reset(self) -> None:
        self.calls.clear()
        self.allocated.clear()
        self.touched.clear()

    def touch(self, tensors: Iterable[Tensor]) -> None:
        """A replay uses this memory."""
        for tensor in tensors:
            self.touched[tensor.untyped_storage().data_ptr()] = tensor


def scramble(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min // 2)


def is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def perform(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Performs an operation on the values, with a GPU's refusals."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    ours = [value for value in tensors if isinstance(value, GpuTensor)]
    goal = kwargs.get("device")
    on_gpu = is_gpu(goal) or (goal is None and bool(ours))
    if not ours and not on_gpu:
        return func(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})
    if func is aten.copy_.default and len(args) > 2 and args[2] and not isinstance(args[0], GpuTensor):
        return arrive_later(args[0], args[1])
    strangers = [value for value in tensors if not isinstance(value, GpuTensor) and value.dim() > 0]
    if strangers and ours and func not in CROSSES:
        raise RuntimeError(f"{func}: tensors of the GPU and of the host, {[tuple(t.shape) for t in strangers]}")
    capture = Capture.running
    if capture is not None:
        crosses = len(ours) < len(tensors) or not on_gpu
        if func in WAITS or (crosses and func in CROSSES):
            raise RuntimeError(f"{func} in a capture: it waits for the device or reads memory of the host")
    inner_args, inner_kwargs = tree_map(
        lambda value: value.inner if isinstance(value, GpuTensor) else value, (args, kwargs)
    )
    if goal is not None:
        inner_kwargs["device"] = torch.device("cpu")
    result = func(*inner_args, **inner_kwargs)
    if func is aten._to_copy.default and result is inner_args[0]:
        result = result.clone()
    owners = {id(value.inner): value for value in ours}
    follow(func, inner_args, inner_kwargs, ours, result)
    if func in WAITS or not on_gpu:
        _order.wait()
    if capture is not None:
        record(capture, func, inner_args, inner_kwargs, result, {id(value.inner) for value in ours})

    def outside(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        owner = owners.get(id(value))
        return owner if owner is not None else GpuTensor(value) if on_gpu else value

    return tree_map(outside, result)


def follow(func: Any, args: Any, kwargs: Any, ours: list[GpuTensor], result: Any) -> None:
    """Orders the operation among those of other streams."""
    given = [value.inner for value in ours]
    if Capture.running is not None:
        Capture.running.touch(given)
        return
    made = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    fresh = [tensor for tensor in made if tensor.untyped_storage().data_ptr() not in known]
    if not fresh and not func._schema.is_mutable:
        return  # a view
    named = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
    targets = [
        value
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for value in tree_flatten(named.get(argument.name))[0]
        if isinstance(value, Tensor)
    ]
    _order.use(given, targets, fresh)


_arriving: list[tuple[Tensor, Tensor]] = []


def arrive_later(target: Tensor, source: GpuTensor) -> Tensor:
    """A non-blocking copy to the host: until the host waits, the target's contents are undefined."""
    _order.use((source.inner,), (), ())
    _arriving.append((target, source.inner.clone()))
    scramble(target)
    return target


def record(capture: Capture, func: Any, args: Any, kwargs: Any, result: Any, given: set[int]) -> None:
    """Records a call. A replay writes to the same memory as the first time; views stay views."""
    made = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
    spans = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
    fresh = [value for value in made if value.untyped_storage().data_ptr() not in spans]
    if not made or (not fresh and all(id(value) not in given for value in made)):
        return  # a view
    capture.allocated += fresh

    def again() -> None:
        found = [value for value in tree_flatten(func(*args, **kwargs))[0] if isinstance(value, Tensor)]
        for old, new in zip(made, found, strict=True):
            if old is not new:
                old.copy_(new)

    if "empty" not in str(func):
        capture.calls.append(again)


class _Mode(TorchDispatchMode):
    """Also sees operations without tensor arguments, such as factories."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import a compiler that is not needed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return perform(func, args, kwargs or {})


def _launch(run: Callable[..., Any]) -> Callable[..., Any]:
    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        strangers = [name for name, value in tensors.items() if not isinstance(value, GpuTensor)]
        if tensors and not strangers and _Device.current != GPU.index:
            strangers = list(tensors)
        if strangers:
            raise ValueError(f"{self.fn.__name__}: {', '.join(strangers)} cannot be accessed from Triton (cpu tensor?)")
        inner = {name: value.inner if isinstance(value, GpuTensor) else value for name, value in kwargs.items()}
        used = [value.inner for value in tensors.values() if isinstance(value, GpuTensor)]
        if Capture.running is not None:
            Capture.running.touch(used)
            Capture.running.calls.append(lambda: run(self, *args, **inner))
        else:
            _order.use(used, used, ())  # which of its arguments it writes is unknown
        return run(self, *args, **inner)

    return launch


@contextmanager
def _graph(graph: Capture, **_: Any) -> Iterator[None]:
    assert Capture.running is None, "captures do not nest"
    Capture.running = graph
    try:
        with _Device(GPU):  # that of the stream
            yield
    finally:
        Capture.running = None


def _to(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`Tensor.to` between the devices and on either one."""

    def to(self: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
        here, goal = isinstance(self, GpuTensor), isinstance(self, GpuTensor) if device is None else is_gpu(device)
        if not here and not goal:
            return original(self, *args, copy=copy, **kwargs)
        dtype = dtype or self.dtype
        if here and goal:
            same = dtype == self.dtype and not copy
            return self if same else perform(aten._to_copy.default, (self,), {"dtype": dtype})  # type: ignore[no-any-return]
        values = original(self.inner if isinstance(self, GpuTensor) else self, dtype, copy=True)
        if Capture.running is None:
            _order.use((self.inner,) if isinstance(self, GpuTensor) else (), (), (values,) if goal else ())
        _wait()
        return GpuTensor(values) if goal else values

    return to


def _arrive() -> None:
    if Capture.running is not None:
        raise RuntimeError("a synchronisation in a capture")
    while _arriving:
        target, values = _arriving.pop(0)
        target.copy_(values)


def _wait(*_: Any) -> None:
    _arrive()
    _order.wait()


def _wait_all(*_: Any) -> None:
    _arrive()
    _order.wait_all()


class _Stream:
    made: ClassVar[list[_Stream]] = []

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = len(self.made)
        self.made.append(self)
        self.clock: Clock = {}

    def wait_stream(self, other: _Stream) -> None:
        _later(self.clock, other.clock)

    def wait_event(self, event: _Event) -> None:
        _later(self.clock, event.clock)

    def synchronize(self) -> None:
        _arrive()
        _later(_order.host, self.clock)


class _Device:
    """Makes a device the current one."""

    current: ClassVar[int] = 0

    def __init__(self, device: Any) -> None:
        self.index, self.before = torch.device(device).index or 0, 0

    def __enter__(self) -> None:
        self.before, _Device.current = _Device.current, self.index

    def __exit__(self, *_: object) -> None:
        _Device.current = self.before


class _Event:
    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, stream: _Stream | None = None) -> None:
        self.clock = dict((stream or _order.current[-1]).clock)

    def query(self) -> bool:
        return not _arriving

    def synchronize(self) -> None:
        _arrive()
        _later(_order.host, self.clock)


_order = Order()


def recorded() -> set[tuple[int, int]]:
    """(address, stream number) of all memory that the allocator keeps until that stream is done with it."""
    return _order.recorded


@contextmanager
def _streamed(stream: _Stream) -> Iterator[None]:
    _order.current.append(stream)
    try:
        with _Device(GPU):
            yield
    finally:
        _order.current.pop()


@contextmanager
def _guarded() -> Iterator[None]:
    """Torch asks a device guard which device is current, and a CPU build has none for CUDA; the guard of "meta", which
    does nothing, is used instead."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 64).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[CUDA] = guards[CUDA], guards[META]
    try:
        yield
    finally:
        guards[CUDA] = before


@contextmanager
def pretended(device: str = "cuda:0") -> Iterator[None]:
    """Inside, this is a GPU, and `device="cuda"` is the same one. Needs Triton's interpreter."""
    tensor, generator, executor = torch.tensor, torch.Generator, interpreter.GridExecutor

    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        kwargs.pop("pin_memory", None)
        made = tensor(data, *args, device="cpu", **kwargs)
        return made.to(torch.empty(0).device if device is None else device)

    properties = SimpleNamespace(major=9, minor=0, total_memory=1 << 33, gcnArchName="")
    fakes = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "synchronize": _wait_all,
        "Stream": _Stream, "Event": _Event, "device": _Device,
        "current_stream": lambda *_: _order.current[-1], "stream": _streamed, "CUDAGraph": Capture, "graph": _graph,
        "graph_pool_handle": lambda: (0, 1), "memory_reserved": lambda *_: 0, "empty_cache": lambda: None,
        "get_device_properties": lambda *_: properties,
    }  # fmt: skip
    global _order, GPU
    _Stream.made.clear()
    _order, GPU = Order(), torch.device(device)
    _device_constructors()  # torch caches the first result, so the real one has to be found before it is replaced below
    with ExitStack() as stack:
        stack.enter_context(_guarded())
        for name, fake in fakes.items():
            stack.enter_context(patch.object(torch.cuda, name, fake))
        stack.enter_context(patch.object(torch, "tensor", make))
        stack.enter_context(patch.object(torch, "Generator", lambda *_: generator()))
        stack.enter_context(patch.object(Tensor, "to", _to(Tensor.to)))
        stack.enter_context(patch.object(Tensor, "cpu", lambda self: self.to("cpu")))
        stack.enter_context(patch.object(executor, "__call__", _launch(executor.__call__)))
        # Inference tensors keep no versions, which views of a tensor subclass ask for.
        stack.enter_context(patch.object(torch.inference_mode, "__enter__", lambda self: None))
        stack.enter_context(patch.object(torch.inference_mode, "__exit__", lambda self, *_: None))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_Mode())
        yield
