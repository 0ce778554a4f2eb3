"""Marks that the GPU makes itself: it writes a number into the memory of rank and agent when it passes a mark.

``cuStreamWriteValue32`` puts such a write between the kernels of a stream: no kernel, no host function, nothing waits
for it. The memory is registered with the driver as NCCL registers its own. Where that is not possible, the GPU's events
remain (``perseus_client.gpu_events``), which are read an iteration later.

A page that was registered stays mapped and registered until the process ends, also when the agent has gone: writes to
it may still wait in a stream, and to unregister it could wait for the GPU.

While a stream is captured into a CUDA graph nothing is written: every replay would write the same number again. So
marks stand between the launches of graphs.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from perseus_core.marks import MarkSource
from perseus_proto.channel import GPU_MARK_BYTE, ChannelWriter, gpu_mark_value

try:
    from perseus_client import _marks
except ImportError:  # built for another machine, or not at all
    _marks = None  # type: ignore[assignment]

log = logging.getLogger("perseus_client")

SKIPPED: Final = -1
"""Nothing was written: the stream is being captured, or another GPU is current."""
PROBE: Final = 2**32 - 2
"""A mark of no schedule: the GPU writes it first, and when it can be read, marks by the GPU work here."""
_PORTABLE_AND_MAPPED: Final = 3
_NON_BLOCKING: Final = 1
_RELAXED: Final = 2
_OF_A_MARK: Final = "cuCtxGetCurrent", "cuStreamIsCapturing", "cuStreamWriteValue32_v2"

Write = Callable[[int], int]
"""Writes a mark on the current stream; 0, ``SKIPPED``, or the number of the driver's error."""


class DriverError(Exception):
    """The driver cannot do it; the text names the call and its answer."""


class Driver(Protocol):
    """What is used of the CUDA driver."""

    def register(self, address: int, length: int) -> int:
        """The GPU's address of this memory. Raises ``DriverError``."""

    def probe(self, pointer: int, value: int) -> None:
        """Write a value on a stream without work. Raises ``DriverError``."""

    def writer(self, pointer: int) -> Write:
        """How marks are written to this address."""


@dataclass
class _Page:
    words: memoryview[int]
    write: Write
    works: bool = False
    """Whether the probe has arrived."""


class GpuMarks:
    """The GPU's marks of one rank. ``prepare`` is called by the connecting thread, the rest by the training thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver: Driver | None = driver
        self._page: _Page | None = None
        self._kept: list[memoryview[int]] = []
        self._writer: ChannelWriter | None = None
        self._write: Write | None = None
        self._first = 0

    def prepare(self, writer: ChannelWriter) -> None:
        """Register the memory of a new agent. Its steps have the source EVENTS until the GPU has been seen to write."""
        writer.source = MarkSource.EVENTS
        driver = self._driver
        if driver is None:
            return
        words = writer.words
        self._kept.append(words)
        try:
            pointer = driver.register(ctypes.addressof(ctypes.c_char.from_buffer(words)), mmap.PAGESIZE)
            driver.probe(pointer + GPU_MARK_BYTE, PROBE)
            self._page = _Page(words, driver.writer(pointer + GPU_MARK_BYTE))
        except Exception as error:  # noqa: BLE001 - events remain
            self._refuse(str(error))

    def open(self, writer: ChannelWriter, iteration: int) -> None:
        """Before a step begins: its marks go to this writer's memory, if the GPU can write there."""
        self._write = None
        page = self._page
        if page is None or page.words is not writer.words:
            return
        if not page.works:
            page.works = page.words[GPU_MARK_BYTE // 8] & 0xFFFFFFFF == PROBE
            if not page.works:
                return
            log.info("perseus_client: the GPU itself marks how far it is")
        writer.source = MarkSource.GPU
        self._writer, self._write, self._first = writer, page.write, gpu_mark_value(iteration, 0)

    def mark(self, boundary: int) -> None:
        """Have the GPU write this boundary of the step, as in ``gpu_mark_value``, once it gets there."""
        write = self._write
        if write is not None and (error := write(self._first | boundary)) > 0:
            self._page = None
            if self._writer is not None:
                self._writer.change_source(MarkSource.EVENTS)
            self._refuse(f"cuStreamWriteValue32_v2 answers {error}")
            self.close()

    def close(self) -> None:
        """The step is over."""
        self._write = self._writer = None

    def _refuse(self, why: str) -> None:
        self._driver = None
        log.warning(
            "perseus_client: the GPU cannot mark how far it is, so the agent learns it an iteration later from events: "
            "%s",
            why,
        )


class CudaDriver:
    """``Driver`` of the device that is current in torch."""

    def __init__(self, library: Any, current_stream: Callable[[int], int], device: int) -> None:
        """Take the context of the calling thread.

        Args:
            library: libcuda, as ctypes loads it.
            current_stream: the handle of the current stream of a device.
            device: number of the device in this process.

        Raises:
            DriverError: a function is missing, or the thread has no context.
        """
        self._current_stream = current_stream
        self._device = device
        handle, out, number, size = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
        self._functions = {}
        # Without its suffix cuStreamWriteValue32 is another function, which drivers have switched off.
        for name, *arguments in (
            ("cuCtxGetCurrent", out),
            ("cuCtxSetCurrent", handle),
            ("cuThreadExchangeStreamCaptureMode", out),
            ("cuMemHostRegister_v2", handle, size, number),
            ("cuMemHostGetDevicePointer_v2", out, handle, number),
            ("cuStreamCreate", out, number),
            ("cuStreamDestroy_v2", handle),
            ("cuStreamIsCapturing", handle, out),
            ("cuStreamWriteValue32_v2", handle, ctypes.c_uint64, ctypes.c_uint32, number),
        ):
            function = getattr(library, name, None)
            if function is None:
                raise DriverError(f"the driver has no {name}: CUDA 11.7 or newer is needed")
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            raise DriverError("this thread has no CUDA context")
        self._context = context.value

    def register(self, address: int, length: int) -> int:
        """Register memory with the driver, from a thread that may have no context and while others capture graphs."""
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))
        self._call("cuCtxSetCurrent", self._context)
        # Where the GPU uses the host's page tables (GH200), registering does not lock pages in memory.
        ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(length))
        self._call("cuMemHostRegister_v2", address, length, _PORTABLE_AND_MAPPED)
        pointer = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), address, 0)
        return pointer.value

    def probe(self, pointer: int, value: int) -> None:
        """Write a value on a stream that nothing else uses."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        try:
            self._call("cuStreamWriteValue32_v2", stream, pointer, value, 0)
        finally:
            self._call("cuStreamDestroy_v2", stream)  # when the write is done

    def writer(self, pointer: int) -> Write:
        """Compiled, if the installation could do it."""
        return self._python_writer(pointer) if _marks is None else self._compiled_writer(pointer)

    def _compiled_writer(self, pointer: int) -> Write:
        get_current, is_capturing, write_value = (
            ctypes.cast(self._functions[name], ctypes.c_void_p).value or 0 for name in _OF_A_MARK
        )
        return _marks.StreamWrite(
            get_current, is_capturing, write_value, self._context, pointer, self._current_stream, self._device
        ).write

    def _python_writer(self, pointer: int) -> Write:
        get_current, is_capturing, write_value = (self._functions[name] for name in _OF_A_MARK)
        ours, current_stream, device = self._context, self._current_stream, self._device

        def write(value: int) -> int:
            context, capturing = ctypes.c_void_p(), ctypes.c_int()
            if get_current(ctypes.byref(context)) or context.value != ours:
                return SKIPPED
            stream = current_stream(device)
            if is_capturing(stream, ctypes.byref(capturing)) or capturing.value:
                return SKIPPED
            error: int = write_value(stream, pointer, value, 0)
            return error

        return write

    def _call(self, name: str, *arguments: object) -> None:
        error = self._functions[name](*arguments)
        if error:
            raise DriverError(f"{name} answers {error}")


def open_gpu_marks() -> GpuMarks | None:
    """Marks by the GPU that is current in torch; None, with a line in the log, where its driver cannot."""
    torch = importlib.import_module("torch")
    try:
        library = ctypes.CDLL("libcuda.so.1")
        driver = CudaDriver(library, torch._C._cuda_getCurrentRawStream, torch.cuda.current_device())
    except (AttributeError, OSError, DriverError) as error:
        log.warning(
            "perseus_client: the GPU cannot mark how far it is, so the agent learns it an iteration later from events: "
            "%s",
            error,
        )
        return None
    return GpuMarks(driver)
