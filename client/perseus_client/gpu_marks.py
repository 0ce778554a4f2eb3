"""Marks that the GPU makes itself: it writes a number into the memory of rank and agent when it passes a mark.

``cuStreamWriteValue32`` puts such a write between the kernels of a stream: no kernel, no host function, nothing waits
for it. The memory is registered with the driver as NCCL registers its own. Where that is not possible, the GPU's events
remain (``perseus_client.gpu_events``), which are read an iteration later.

A page that was registered stays mapped and registered until the process ends, also when the agent has gone: writes to
it may still wait in a stream, and to unregister it could wait for the GPU.

A write to a stream that is captured into a CUDA graph becomes a node of the graph, which writes the same number at
every replay. So within an iteration that is captured as a whole, nodes write where in the iteration the GPU is, to a
word of their own, and the stream writes the iteration's number before it replays them. In any other graph, such as that
of a layer, nothing is written: marks stand between its launches.
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
from perseus_proto.channel_layout import GRAPH_MARK_BYTE

try:
    from perseus_client import _marks
except ImportError:  # built for another machine, or not at all
    _marks = None  # type: ignore[assignment]

log = logging.getLogger("perseus_client")

SKIPPED: Final = -1
"""Nothing was written: the stream is being captured, or is not where a graph is written, or another GPU is current."""
PROBE: Final = 2**32 - 2
"""A mark of no schedule: the GPU writes it first, and when it can be read, marks by the GPU work here."""
_PORTABLE_AND_MAPPED: Final = 3
_NON_BLOCKING: Final = 1
_RELAXED: Final = 2
_NO_CAPTURE, _CAPTURE = 0, 1  # status of a stream; 2: its capture has failed
_OF_A_MARK: Final = "cuCtxGetCurrent", "cuStreamIsCapturing", "cuStreamWriteValue32_v2"
_OUT, _HANDLE, _NUMBER, _SIZE = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
# Without its suffix cuStreamWriteValue32 is another function, which drivers have switched off.
_FUNCTIONS: Final = {
    "cuCtxGetCurrent": [_OUT],
    "cuCtxSetCurrent": [_HANDLE],
    "cuThreadExchangeStreamCaptureMode": [_OUT],
    "cuMemHostRegister_v2": [_HANDLE, _SIZE, _NUMBER],
    "cuMemHostGetDevicePointer_v2": [_OUT, _HANDLE, _NUMBER],
    "cuStreamCreate": [_OUT, _NUMBER],
    "cuStreamDestroy_v2": [_HANDLE],
    "cuStreamIsCapturing": [_HANDLE, _OUT],
    "cuStreamWriteValue32_v2": [_HANDLE, ctypes.c_uint64, ctypes.c_uint32, _NUMBER],
}
_GRAPH_FUNCTIONS: Final = {
    "cuStreamBeginCapture_v2": [_HANDLE, ctypes.c_int],
    "cuStreamEndCapture": [_HANDLE, _OUT],
    "cuGraphGetNodes": [_HANDLE, _OUT, _OUT],
    "cuGraphInstantiateWithFlags": [_OUT, _HANDLE, ctypes.c_ulonglong],
    "cuGraphLaunch": [_HANDLE, _HANDLE],
    "cuGraphExecDestroy": [_HANDLE],
    "cuGraphDestroy": [_HANDLE],
}

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

    def probe_graph(self, pointer: int, value: int) -> None:
        """Write a value from a graph of one node. Raises ``DriverError``."""

    def writer(self, pointer: int, in_graph: bool = False) -> Write:
        """How marks are written to this address: at once, or as nodes of the graph that is being captured."""


@dataclass
class _Page:
    words: memoryview[int]
    write: Write
    write_node: Write
    """A node of the graph that is captured writes, at every replay."""
    reset: Write
    """Writes where the nodes do."""
    works: bool = False
    """Whether the probe has arrived."""
    graphs: bool = False
    """Whether nodes of a graph write here."""


class GpuMarks:
    """The GPU's marks of one rank. ``prepare`` is called by the connecting thread, the rest by the training thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver: Driver | None = driver
        self._page: _Page | None = None
        self._kept: list[memoryview[int]] = []
        self._writer: ChannelWriter | None = None
        self._write: Write | None = None
        self._first = 0
        self._complete = True
        """Whether every mark since ``open_graph`` has become a node."""

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
            graph_mark = pointer + GRAPH_MARK_BYTE
            write, write_node, reset = (
                driver.writer(pointer + GPU_MARK_BYTE),
                driver.writer(graph_mark, in_graph=True),
                driver.writer(graph_mark),
            )
            self._page = _Page(words, write, write_node, reset)
        except Exception as error:  # noqa: BLE001 - events remain
            self._refuse(str(error))
            return
        try:
            driver.probe_graph(graph_mark, PROBE)
        except Exception as error:  # noqa: BLE001 - the graph's events remain
            log.info("perseus_client: the GPU cannot mark how far it is inside CUDA graphs: %s", error)

    def open(self, writer: ChannelWriter, iteration: int) -> None:
        """Before a step begins: its marks go to this writer's memory, if the GPU can write there."""
        self._write = None
        page = self._page
        if page is None or page.words is not writer.words:
            return
        if not page.works:
            page.works = _probed(page, GPU_MARK_BYTE)
            if not page.works:
                return
            log.info("perseus_client: the GPU itself marks how far it is")
        writer.source = MarkSource.GPU
        self._writer, self._write, self._first = writer, page.write, gpu_mark_value(iteration, 0)
        if page.graphs and (error := page.reset(0)) > 0:  # what the last replay has left there
            self._fail(error)

    def open_graph(self, writer: ChannelWriter) -> bool:
        """Before an iteration is captured: its marks become nodes that write to this writer's memory. False: the GPU
        has not been seen to write there from a graph."""
        page = self._page
        if page is None or page.words is not writer.words or not (page.graphs or _probed(page, GRAPH_MARK_BYTE)):
            return False
        page.graphs = self._complete = True
        self._writer, self._write, self._first = None, page.write_node, 0
        return True

    def close_graph(self) -> bool:
        """It has been captured. Whether all of its marks are nodes now."""
        self.close()
        return self._complete

    def mark(self, boundary: int) -> None:
        """Have the GPU write this boundary of the step, as in ``gpu_mark_value``, once it gets there."""
        write = self._write
        if write is not None and (error := write(self._first | boundary)):
            self._complete = False
            if error > 0:
                self._fail(error)

    def close(self) -> None:
        """The step is over."""
        self._write = self._writer = None

    def _fail(self, error: int) -> None:
        """A write was refused: leave the rest to events."""
        self._page = None
        if self._writer is not None:
            self._writer.change_source(MarkSource.EVENTS)
        self._refuse(f"cuStreamWriteValue32_v2 answers {error}")
        self.close()

    def _refuse(self, why: str) -> None:
        self._driver = None
        log.warning(
            "perseus_client: the GPU cannot mark how far it is, so the agent learns it an iteration later from events: "
            "%s",
            why,
        )


def _probed(page: _Page, byte: int) -> bool:
    """Whether the probe has arrived at a byte of the memory."""
    return page.words[byte // 8] >> 8 * (byte % 8) & 0xFFFFFFFF == PROBE


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
        self._functions = {}
        for name, arguments in (_FUNCTIONS | _GRAPH_FUNCTIONS).items():
            function = getattr(library, name, None)
            if function is None and name in _FUNCTIONS:
                raise DriverError(f"the driver has no {name}: CUDA 11.7 or newer is needed")
            if function is not None:
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

    def probe_graph(self, pointer: int, value: int) -> None:
        """Capture a write to a stream that nothing else uses, and launch the graph. A driver that cannot capture it
        would make training's own capture fail."""
        stream, graph, launched = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        nodes = ctypes.c_size_t()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        try:
            self._call("cuStreamBeginCapture_v2", stream, _RELAXED)
            try:
                self._call("cuStreamWriteValue32_v2", stream, pointer, value, 0)
            finally:
                self._call("cuStreamEndCapture", stream, ctypes.byref(graph))
            self._call("cuGraphGetNodes", graph, None, ctypes.byref(nodes))
            if nodes.value != 1:
                raise DriverError(f"a graph of one write has {nodes.value} nodes")
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(launched), graph, 0)
            self._call("cuGraphLaunch", launched, stream)
        finally:
            if launched:
                self._call("cuGraphExecDestroy", launched)  # when it has run
            if graph:
                self._call("cuGraphDestroy", graph)
            self._call("cuStreamDestroy_v2", stream)

    def writer(self, pointer: int, in_graph: bool = False) -> Write:
        """Compiled, if the installation could do it."""
        status = _CAPTURE if in_graph else _NO_CAPTURE
        return self._python_writer(pointer, status) if _marks is None else self._compiled_writer(pointer, status)

    def _compiled_writer(self, pointer: int, status: int) -> Write:
        get_current, is_capturing, write_value = (
            ctypes.cast(self._functions[name], ctypes.c_void_p).value or 0 for name in _OF_A_MARK
        )
        return _marks.StreamWrite(
            get_current, is_capturing, write_value, self._context, pointer, status, self._current_stream, self._device
        ).write

    def _python_writer(self, pointer: int, status: int) -> Write:
        get_current, is_capturing, write_value = (self._functions[name] for name in _OF_A_MARK)
        ours, current_stream, device = self._context, self._current_stream, self._device

        def write(value: int) -> int:
            context, capturing = ctypes.c_void_p(), ctypes.c_int()
            if get_current(ctypes.byref(context)) or context.value != ours:
                return SKIPPED
            stream = current_stream(device)
            if is_capturing(stream, ctypes.byref(capturing)) or capturing.value != status:
                return SKIPPED
            error: int = write_value(stream, pointer, value, 0)
            return error

        return write

    def _call(self, name: str, *arguments: object) -> None:
        if name not in self._functions:
            raise DriverError(f"the driver has no {name}")
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
