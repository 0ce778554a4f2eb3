from perseus_proto.v1alpha1 import operator_pb2 as _operator_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ReadPageRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class ReadPageResponse(_message.Message):
    __slots__ = ("status", "document")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    status: int
    document: bytes
    def __init__(self, status: _Optional[int] = ..., document: _Optional[bytes] = ...) -> None: ...
