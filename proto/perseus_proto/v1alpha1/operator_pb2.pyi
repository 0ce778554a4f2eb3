from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SetStragglerRequest(_message.Message):
    __slots__ = ("id", "delay_ms", "delay_iterations", "slowdown", "namespace", "job", "epoch")
    ID_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    DELAY_ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    id: str
    delay_ms: int
    delay_iterations: int
    slowdown: float
    namespace: str
    job: str
    epoch: int
    def __init__(self, id: _Optional[str] = ..., delay_ms: _Optional[int] = ..., delay_iterations: _Optional[int] = ..., slowdown: _Optional[float] = ..., namespace: _Optional[str] = ..., job: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class SetStragglerResponse(_message.Message):
    __slots__ = ("namespace", "job", "annotation", "epoch")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ANNOTATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    job: str
    annotation: str
    epoch: int
    def __init__(self, namespace: _Optional[str] = ..., job: _Optional[str] = ..., annotation: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...
