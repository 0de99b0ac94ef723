from saccade.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Modality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODALITY_UNSPECIFIED: _ClassVar[Modality]
    MODALITY_TEXT: _ClassVar[Modality]
    MODALITY_IMAGE: _ClassVar[Modality]
    MODALITY_VIDEO: _ClassVar[Modality]
MODALITY_UNSPECIFIED: Modality
MODALITY_TEXT: Modality
MODALITY_IMAGE: Modality
MODALITY_VIDEO: Modality

class ListModelsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "next_page_token")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    next_page_token: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text", "tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "version", "model_type", "dtype", "input_modalities", "limits", "default_sampling", "image_token_id", "eos_token_ids", "vocab_size", "has_tokenizer", "has_chat_template")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    INPUT_MODALITIES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    model_type: str
    dtype: str
    input_modalities: _containers.RepeatedScalarFieldContainer[Modality]
    limits: Limits
    default_sampling: _types_pb2.SamplingParams
    image_token_id: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., model_type: _Optional[str] = ..., dtype: _Optional[str] = ..., input_modalities: _Optional[_Iterable[_Union[Modality, str]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., default_sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., image_token_id: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., vocab_size: _Optional[int] = ..., has_tokenizer: _Optional[bool] = ..., has_chat_template: _Optional[bool] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("context_length", "max_message_bytes", "max_images", "max_image_bytes", "max_image_pixels", "min_image_tokens", "max_image_tokens", "image_formats", "uri_schemes", "max_samples", "max_logprobs", "max_stop_strings", "max_stop_string_length", "max_videos", "max_video_bytes", "max_video_frames", "max_video_file_frames", "max_video_pixels", "video_formats")
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MIN_IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FORMATS_FIELD_NUMBER: _ClassVar[int]
    URI_SCHEMES_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRING_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_VIDEOS_FIELD_NUMBER: _ClassVar[int]
    MAX_VIDEO_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_VIDEO_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_VIDEO_FILE_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_VIDEO_PIXELS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FORMATS_FIELD_NUMBER: _ClassVar[int]
    context_length: int
    max_message_bytes: int
    max_images: int
    max_image_bytes: int
    max_image_pixels: int
    min_image_tokens: int
    max_image_tokens: int
    image_formats: _containers.RepeatedScalarFieldContainer[str]
    uri_schemes: _containers.RepeatedScalarFieldContainer[str]
    max_samples: int
    max_logprobs: int
    max_stop_strings: int
    max_stop_string_length: int
    max_videos: int
    max_video_bytes: int
    max_video_frames: int
    max_video_file_frames: int
    max_video_pixels: int
    video_formats: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, context_length: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_images: _Optional[int] = ..., max_image_bytes: _Optional[int] = ..., max_image_pixels: _Optional[int] = ..., min_image_tokens: _Optional[int] = ..., max_image_tokens: _Optional[int] = ..., image_formats: _Optional[_Iterable[str]] = ..., uri_schemes: _Optional[_Iterable[str]] = ..., max_samples: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., max_stop_string_length: _Optional[int] = ..., max_videos: _Optional[int] = ..., max_video_bytes: _Optional[int] = ..., max_video_frames: _Optional[int] = ..., max_video_file_frames: _Optional[int] = ..., max_video_pixels: _Optional[int] = ..., video_formats: _Optional[_Iterable[str]] = ...) -> None: ...
