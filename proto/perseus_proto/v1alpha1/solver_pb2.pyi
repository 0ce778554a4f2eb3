from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_SOLVE: _ClassVar[Task]
    TASK_CALIBRATE: _ClassVar[Task]
    TASK_PLAN_SERVING: _ClassVar[Task]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_ANSWERED: _ClassVar[Outcome]
    OUTCOME_INVALID_PROFILE: _ClassVar[Outcome]
    OUTCOME_REFUSED: _ClassVar[Outcome]
    OUTCOME_OUT_OF_TIME: _ClassVar[Outcome]
    OUTCOME_OUT_OF_MEMORY: _ClassVar[Outcome]
    OUTCOME_DIED: _ClassVar[Outcome]
TASK_UNSPECIFIED: Task
TASK_SOLVE: Task
TASK_CALIBRATE: Task
TASK_PLAN_SERVING: Task
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_ANSWERED: Outcome
OUTCOME_INVALID_PROFILE: Outcome
OUTCOME_REFUSED: Outcome
OUTCOME_OUT_OF_TIME: Outcome
OUTCOME_OUT_OF_MEMORY: Outcome
OUTCOME_DIED: Outcome

class WorkRequest(_message.Message):
    __slots__ = ("version", "task", "request")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    version: str
    task: Task
    request: bytes
    def __init__(self, version: _Optional[str] = ..., task: _Optional[_Union[Task, str]] = ..., request: _Optional[bytes] = ...) -> None: ...

class WorkResponse(_message.Message):
    __slots__ = ("outcome", "answer", "message", "solve_ms")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SOLVE_MS_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    answer: bytes
    message: str
    solve_ms: int
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., answer: _Optional[bytes] = ..., message: _Optional[str] = ..., solve_ms: _Optional[int] = ...) -> None: ...
