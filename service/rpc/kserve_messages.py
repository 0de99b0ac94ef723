"""KServe's message classes, in a separate descriptor pool.

In the default pool, their names belong to the first package that registers them, and another client library could not
be imported in the same process.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import Default, DescriptorPool
from google.protobuf.message_factory import GetMessageClass

SERVICE = "inference.GRPCInferenceService"


def _load_pool() -> DescriptorPool:
    pool = DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString((Path(__file__).parent / "kserve.binpb").read_bytes())
    for file in files.file:
        pool.Add(file)
    return pool


POOL = _load_pool()


def message(name: str) -> Any:
    """The class of the message `inference.NAME`."""
    return GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


def reflection_pool(services: list[str]) -> DescriptorPool:
    """A pool that describes `services` of the default pool and KServe's."""
    pool = _load_pool()
    seen: set[str] = set()

    def add(file: Any) -> None:
        if file.name in seen:
            return
        seen.add(file.name)
        for dependency in file.dependencies:
            add(dependency)
        pool.AddSerializedFile(file.serialized_pb)

    for name in set(services) - {SERVICE}:
        with contextlib.suppress(KeyError):
            add(Default().FindFileContainingSymbol(name))
    return pool
