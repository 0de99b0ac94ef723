from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

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
    __slots__ = ("live_requests", "running", "waiting", "free_blocks", "total_blocks", "handoff_used_bytes", "handoff_capacity_bytes", "inflight_bytes", "media_bytes", "draining", "max_running", "max_requests", "handoff_cached_bytes", "waiting_media", "encoding_media", "prefix_cache_bytes", "prefix_cache_checkpoints", "prefix_cache_hit_tokens", "output_tokens", "encoder")
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
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_CACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_MEDIA_FIELD_NUMBER: _ClassVar[int]
    ENCODING_MEDIA_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
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
    max_running: int
    max_requests: int
    handoff_cached_bytes: int
    waiting_media: int
    encoding_media: int
    prefix_cache_bytes: int
    prefix_cache_checkpoints: int
    prefix_cache_hit_tokens: int
    output_tokens: int
    encoder: EncoderLoads
    def __init__(self, live_requests: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., handoff_used_bytes: _Optional[int] = ..., handoff_capacity_bytes: _Optional[int] = ..., inflight_bytes: _Optional[int] = ..., media_bytes: _Optional[int] = ..., draining: _Optional[bool] = ..., max_running: _Optional[int] = ..., max_requests: _Optional[int] = ..., handoff_cached_bytes: _Optional[int] = ..., waiting_media: _Optional[int] = ..., encoding_media: _Optional[int] = ..., prefix_cache_bytes: _Optional[int] = ..., prefix_cache_checkpoints: _Optional[int] = ..., prefix_cache_hit_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., encoder: _Optional[_Union[EncoderLoads, _Mapping]] = ...) -> None: ...

class EncoderLoads(_message.Message):
    __slots__ = ("budgets", "max_images", "images", "temporal_patches", "real_tokens", "padded_tokens", "eager_launches")
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPORAL_PATCHES_FIELD_NUMBER: _ClassVar[int]
    REAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PADDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EAGER_LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    budgets: _containers.RepeatedCompositeFieldContainer[EncoderBudget]
    max_images: int
    images: int
    temporal_patches: int
    real_tokens: int
    padded_tokens: int
    eager_launches: int
    def __init__(self, budgets: _Optional[_Iterable[_Union[EncoderBudget, _Mapping]]] = ..., max_images: _Optional[int] = ..., images: _Optional[int] = ..., temporal_patches: _Optional[int] = ..., real_tokens: _Optional[int] = ..., padded_tokens: _Optional[int] = ..., eager_launches: _Optional[int] = ...) -> None: ...

class EncoderBudget(_message.Message):
    __slots__ = ("tokens", "graph", "replays")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    REPLAYS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    graph: bool
    replays: int
    def __init__(self, tokens: _Optional[int] = ..., graph: _Optional[bool] = ..., replays: _Optional[int] = ...) -> None: ...

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
