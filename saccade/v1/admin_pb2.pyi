from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("live_requests",)
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    live_requests: int
    def __init__(self, live_requests: _Optional[int] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("live_requests", "running", "waiting", "free_blocks", "total_blocks", "handoff_used_bytes", "handoff_capacity_bytes", "inflight_bytes", "media_bytes", "draining")
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    live_requests: int
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    handoff_used_bytes: int
    handoff_capacity_bytes: int
    inflight_bytes: int
    media_bytes: int
    draining: bool
    def __init__(self, live_requests: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., handoff_used_bytes: _Optional[int] = ..., handoff_capacity_bytes: _Optional[int] = ..., inflight_bytes: _Optional[int] = ..., media_bytes: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class UpdateLogLevelRequest(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: str
    def __init__(self, level: _Optional[str] = ...) -> None: ...

class UpdateLogLevelResponse(_message.Message):
    __slots__ = ("previous_level",)
    PREVIOUS_LEVEL_FIELD_NUMBER: _ClassVar[int]
    previous_level: str
    def __init__(self, previous_level: _Optional[str] = ...) -> None: ...
