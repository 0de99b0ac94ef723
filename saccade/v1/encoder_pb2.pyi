from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("hello", "item", "pixels", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: Partner
    item: EncodeItem
    pixels: Piece
    cancel: int
    def __init__(self, hello: _Optional[_Union[Partner, _Mapping]] = ..., item: _Optional[_Union[EncodeItem, _Mapping]] = ..., pixels: _Optional[_Union[Piece, _Mapping]] = ..., cancel: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "rows", "encoded", "failure", "credit", "draining")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    rows: Piece
    encoded: Encoded
    failure: EncodeFailure
    credit: Credit
    draining: bool
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., rows: _Optional[_Union[Piece, _Mapping]] = ..., encoded: _Optional[_Union[Encoded, _Mapping]] = ..., failure: _Optional[_Union[EncodeFailure, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., draining: _Optional[bool] = ...) -> None: ...

class Partner(_message.Message):
    __slots__ = ("protocol", "model", "revision", "weights_digest", "preprocessing", "dtype", "hidden_size")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREPROCESSING_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    model: str
    revision: str
    weights_digest: str
    preprocessing: str
    dtype: str
    hidden_size: int
    def __init__(self, protocol: _Optional[int] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., weights_digest: _Optional[str] = ..., preprocessing: _Optional[str] = ..., dtype: _Optional[str] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("partner", "window_bytes", "max_tokens")
    PARTNER_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    partner: Partner
    window_bytes: int
    max_tokens: int
    def __init__(self, partner: _Optional[_Union[Partner, _Mapping]] = ..., window_bytes: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class EncodeItem(_message.Message):
    __slots__ = ("ticket", "key", "grid_rows", "grid_columns", "merge_size", "shape", "dtype", "num_frames", "pruning_rate", "priority", "seconds_left", "order", "slices", "slices_first")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    GRID_ROWS_FIELD_NUMBER: _ClassVar[int]
    GRID_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    MERGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    PRUNING_RATE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIRST_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    key: bytes
    grid_rows: int
    grid_columns: int
    merge_size: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    num_frames: int
    pruning_rate: float
    priority: int
    seconds_left: float
    order: str
    slices: _containers.RepeatedScalarFieldContainer[int]
    slices_first: bool
    def __init__(self, ticket: _Optional[int] = ..., key: _Optional[bytes] = ..., grid_rows: _Optional[int] = ..., grid_columns: _Optional[int] = ..., merge_size: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., num_frames: _Optional[int] = ..., pruning_rate: _Optional[float] = ..., priority: _Optional[int] = ..., seconds_left: _Optional[float] = ..., order: _Optional[str] = ..., slices: _Optional[_Iterable[int]] = ..., slices_first: _Optional[bool] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("ticket", "data")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    data: bytes
    def __init__(self, ticket: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Encoded(_message.Message):
    __slots__ = ("ticket", "counts")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class EncodeFailure(_message.Message):
    __slots__ = ("ticket", "message", "invalid")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    INVALID_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    message: str
    invalid: bool
    def __init__(self, ticket: _Optional[int] = ..., message: _Optional[str] = ..., invalid: _Optional[bool] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("bytes", "waiting_tokens")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    waiting_tokens: int
    def __init__(self, bytes: _Optional[int] = ..., waiting_tokens: _Optional[int] = ...) -> None: ...
