/* The marks of perseus_client.marks, compiled: the same methods, the same stores, a fifth of the time in training, where
 * every object that a mark touches has left the caches. Optional: without a compiler at installation, or on another
 * Python, marks.py is used. The layout is perseus_proto.channel_layout's; a test compares the memory that both leave behind.
 *
 * A mark stores its time, then its position, and then loads the word `silent from` and the wake map. Here, unlike in
 * Python, the store of the position is sequentially consistent, so that it cannot stay in a store buffer.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

enum { SILENT_FROM = 4, SOURCE = 5, POSITION = 8, STEP_BEGIN = 9, WAKE = 24, SLOTS = 4 }; /* words of 8 bytes */
enum { SEQUENCE, BEGIN, END, FAULTS, ENDED, RECORD_SOURCE, TIMES = 8 };                /* words of a record */
enum { HOST = 1, SYNCHRONISED = 2 };                                                   /* mark sources */
enum { STEP_BEGUN = 1 << 24, BEGUN = 2 << 24, HAS_ENDED = 3 << 24, STEP_ENDED = 4 << 24 }; /* phases */
enum { OUT_OF_ORDER = 1, UNKNOWN_INSTRUCTION = 2 };

typedef struct {
    PyObject_HEAD
    PyObject *index;    /* dict: (kind, microbatch, chunk) -> position */
    PyObject **kinds;   /* of each position: its name, by which hooks call it */
    int32_t (*numbers)[2]; /* of each position: microbatch, chunk */
    Py_ssize_t count, next, ended;
    PyObject *writer;   /* while a step is open */
    Py_buffer memory;
    uint64_t *words, *record; /* record: of the iteration that is open */
} Marks;

static uint64_t now_us(void) {
    struct timespec now; /* what time.monotonic_ns() reads */
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

static void close_memory(Marks *self) {
    if (self->words != NULL) {
        self->words = NULL;
        PyBuffer_Release(&self->memory);
    }
    Py_CLEAR(self->writer);
}

/* The position, without the iteration, in one store that no load after it overtakes. */
static void stand(Marks *self, uint32_t phase, Py_ssize_t at) {
    atomic_store((_Atomic uint32_t *)(self->words + POSITION), phase + (uint32_t)at);
}

/* Ring, unless the agent will look by itself; -1 with an exception set. */
static int ring(Marks *self, uint64_t now) {
    uint64_t silent_from = atomic_load((_Atomic uint64_t *)(self->words + SILENT_FROM));
    if (silent_from != 0 && silent_from <= now) return 0;
    PyObject *rung = PyObject_CallMethod(self->writer, "ring", NULL);
    Py_XDECREF(rung);
    return rung == NULL ? -1 : 0;
}

/* Position of an instruction, -1 if it is not in the schedule, -2 with an exception set. */
static Py_ssize_t find(Marks *self, PyObject *const *arguments, Py_ssize_t given) {
    PyObject *zero = PyLong_FromLong(0);
    if (zero == NULL) return -2;
    PyObject *key = PyTuple_Pack(3, arguments[0], given > 1 ? arguments[1] : zero, given > 2 ? arguments[2] : zero);
    Py_DECREF(zero);
    if (key == NULL) return -2;
    PyObject *found = PyDict_GetItemWithError(self->index, key);
    Py_DECREF(key);
    if (found != NULL) return PyLong_AsSsize_t(found);
    return PyErr_Occurred() ? -2 : -1;
}

/* Whether an instruction is the one at a position, judged without making an object. */
static int is_at(Marks *self, Py_ssize_t position, PyObject *const *arguments, Py_ssize_t given) {
    if (position >= self->count || arguments[0] != self->kinds[position]) return 0;
    for (Py_ssize_t k = 1; k < 3; k++) {
        long number = k < given ? PyLong_AsLong(arguments[k]) : 0;
        if (number == -1 && PyErr_Occurred()) {
            PyErr_Clear(); /* the dictionary will say what it is */
            return 0;
        }
        if (number != self->numbers[position][k - 1]) return 0;
    }
    return 1;
}

static PyObject *begin(Marks *self, PyObject *const *arguments, Py_ssize_t given) {
    if (given < 2 || given > 3) {
        PyErr_SetString(PyExc_TypeError, "begin(kind, microbatch, chunk=0)");
        return NULL;
    }
    if (self->words == NULL) return PyLong_FromLong(0);
    int faults = 0;
    Py_ssize_t at = self->next;
    if (!is_at(self, at, arguments, given)) {
        at = find(self, arguments, given);
        if (at == -2) return NULL;
        if (at == -1) return PyLong_FromLong(UNKNOWN_INSTRUCTION);
        faults = at == self->next ? 0 : OUT_OF_ORDER;
    }
    self->next = at + 1;
    self->record[TIMES + 2 * at] = now_us();
    stand(self, BEGUN, at);
    return PyLong_FromLong(faults);
}

static PyObject *end(Marks *self, PyObject *const *arguments, Py_ssize_t given) {
    if (given > 3) {
        PyErr_SetString(PyExc_TypeError, "end(kind=None, microbatch=0, chunk=0)");
        return NULL;
    }
    if (self->words == NULL) return PyLong_FromLong(0);
    Py_ssize_t at = self->next - 1;
    if (given && arguments[0] != Py_None && !(at >= 0 && is_at(self, at, arguments, given))) {
        at = find(self, arguments, given);
        if (at == -2) return NULL;
        if (at == -1) return PyLong_FromLong(UNKNOWN_INSTRUCTION);
    }
    if (at < 0 || at >= self->next) return PyLong_FromLong(OUT_OF_ORDER);
    self->ended = at;
    uint64_t now = now_us();
    self->record[TIMES + 2 * at + 1] = now;
    self->record[ENDED]++;
    stand(self, HAS_ENDED, at);
    const uint8_t *wake = (const uint8_t *)(self->words + WAKE);
    if (wake[at + 1 < self->count ? at + 1 : 0] && ring(self, now) < 0) return NULL;
    return PyLong_FromLong(0);
}

static PyObject *open_step(Marks *self, PyObject *const *arguments, Py_ssize_t given) {
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "open(writer, iteration)");
        return NULL;
    }
    close_memory(self);
    self->next = 0;
    uint64_t iteration = PyLong_AsUnsignedLongLong(arguments[1]);
    if (PyErr_Occurred()) return NULL;
    PyObject *given_source = PyObject_GetAttrString(arguments[0], "source");
    uint64_t source = given_source == NULL ? 0 : PyLong_AsUnsignedLongLong(given_source);
    Py_XDECREF(given_source);
    if (PyErr_Occurred()) return NULL;
    PyObject *memory = PyObject_GetAttrString(arguments[0], "words");
    int taken = memory == NULL ? -1 : PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE);
    Py_XDECREF(memory);
    if (taken < 0) return NULL;
    Py_ssize_t first = WAKE + (self->count + 63) / 64 * 8, size = TIMES + 3 * self->count;
    if (self->memory.len != 8 * (first + SLOTS * size)) {
        PyBuffer_Release(&self->memory);
        PyErr_SetString(PyExc_ValueError, "writer: its memory is not that of this schedule");
        return NULL;
    }
    self->words = self->memory.buf;
    self->record = self->words + first + (Py_ssize_t)(iteration % SLOTS) * size;
    self->writer = Py_NewRef(arguments[0]);
    uint64_t now = now_us();
    self->words[SOURCE] = source;
    self->record[SEQUENCE] = 2 * iteration + 1;
    self->record[BEGIN] = self->words[STEP_BEGIN] = now;
    self->record[END] = self->record[FAULTS] = self->record[ENDED] = 0;
    atomic_store((_Atomic uint64_t *)(self->words + POSITION), (iteration << 32) + STEP_BEGUN);
    if (ring(self, now) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *finish_step(Marks *self, PyObject *faults) {
    unsigned long long given = PyLong_AsUnsignedLongLong(faults);
    if (PyErr_Occurred()) return NULL;
    if (self->words != NULL) {
        stand(self, STEP_ENDED, 0);
        self->record[END] = now_us();
        self->record[FAULTS] = given;
        self->record[RECORD_SOURCE] = self->words[SOURCE] == SYNCHRONISED ? SYNCHRONISED : HOST;
        atomic_store((_Atomic uint64_t *)(self->record + SEQUENCE), self->record[SEQUENCE] + 1);
    }
    close_memory(self);
    Py_RETURN_NONE;
}

static PyObject *close_step(Marks *self, PyObject *Py_UNUSED(none)) {
    close_memory(self);
    Py_RETURN_NONE;
}

static PyObject *get_next(Marks *self, void *Py_UNUSED(closure)) { return PyLong_FromSsize_t(self->next); }
static PyObject *get_ended(Marks *self, void *Py_UNUSED(closure)) { return PyLong_FromSsize_t(self->ended); }

/* Marks(names, index): names is a list of (name, microbatch, chunk), the schedule; index finds a position by these or
 * by the kind's number. */
static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords)) {
    PyObject *names, *index;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &names, &PyDict_Type, &index)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Marks *self = (Marks *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->index = Py_NewRef(index);
    self->count = PyList_Size(names);
    self->kinds = PyMem_Calloc((size_t)self->count + 1, sizeof *self->kinds);
    self->numbers = PyMem_Calloc((size_t)self->count + 1, sizeof *self->numbers);
    if (self->kinds == NULL || self->numbers == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t k = 0; k < self->count; k++) {
        PyObject *name;
        if (!PyArg_ParseTuple(PyList_GetItem(names, k), "Uii", &name, &self->numbers[k][0], &self->numbers[k][1])) {
            Py_DECREF(self);
            return NULL;
        }
        self->kinds[k] = Py_NewRef(name);
    }
    return (PyObject *)self;
}

static void drop(Marks *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    close_memory(self);
    for (Py_ssize_t k = 0; self->kinds != NULL && k < self->count; k++) Py_XDECREF(self->kinds[k]);
    PyMem_Free(self->kinds);
    PyMem_Free(self->numbers);
    Py_XDECREF(self->index);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* A mark that the GPU writes: perseus_client.gpu_marks. StreamWrite(current context, is capturing, write value: addresses
 * of the driver's functions; context, GPU's address of the mark, the status of the stream under which it is written: 0
 * at once, 1 as a node of the graph that is captured; function that returns the current stream, device). */
typedef struct {
    PyObject_HEAD
    int (*get_current)(void **context);
    int (*is_capturing)(void *stream, int *status);
    int (*write_value)(void *stream, uint64_t address, uint32_t value, unsigned flags);
    void *context;
    uint64_t pointer;
    int status;
    PyObject *current_stream, *device;
} StreamWrite;

enum { SKIPPED = -1 };

static PyObject *stream_write(StreamWrite *self, PyObject *value) {
    unsigned long long number = PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred()) return NULL;
    void *context = NULL;
    int capturing = 0, error;
    if (self->get_current(&context) || context != self->context) return PyLong_FromLong(SKIPPED);
    PyObject *found = PyObject_CallFunctionObjArgs(self->current_stream, self->device, NULL);
    if (found == NULL) return NULL;
    void *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    if (PyErr_Occurred()) return NULL;
    if (self->is_capturing(stream, &capturing) || capturing != self->status) return PyLong_FromLong(SKIPPED);
    Py_BEGIN_ALLOW_THREADS /* a full launch queue makes it wait, as it does every launch */
    error = self->write_value(stream, self->pointer, (uint32_t)number, 0);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(error);
}

static PyObject *make_stream_write(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords)) {
    unsigned long long get_current, is_capturing, write_value, context, pointer;
    int status;
    PyObject *current_stream, *device;
    if (!PyArg_ParseTuple(arguments, "KKKKKiOO", &get_current, &is_capturing, &write_value, &context, &pointer, &status,
                          &current_stream, &device))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    StreamWrite *self = (StreamWrite *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->get_current = (int (*)(void **))(uintptr_t)get_current;
    self->is_capturing = (int (*)(void *, int *))(uintptr_t)is_capturing;
    self->write_value = (int (*)(void *, uint64_t, uint32_t, unsigned))(uintptr_t)write_value;
    self->context = (void *)(uintptr_t)context;
    self->pointer = pointer;
    self->status = status;
    self->current_stream = Py_NewRef(current_stream);
    self->device = Py_NewRef(device);
    return (PyObject *)self;
}

static void drop_stream_write(StreamWrite *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->current_stream);
    Py_XDECREF(self->device);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef stream_write_methods[] = {{"write", (PyCFunction)stream_write, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static PyType_Slot stream_write_slots[] = {
    {Py_tp_new, make_stream_write},
    {Py_tp_dealloc, drop_stream_write},
    {Py_tp_methods, stream_write_methods},
    {0, NULL},
};
static PyType_Spec stream_write_spec = {"perseus_client._marks.StreamWrite", sizeof(StreamWrite), 0, Py_TPFLAGS_DEFAULT,
                                        stream_write_slots};

static PyMethodDef methods[] = {
    {"open", (PyCFunction)(void (*)(void))open_step, METH_FASTCALL, NULL},
    {"finish", (PyCFunction)finish_step, METH_O, NULL},
    {"close", (PyCFunction)close_step, METH_NOARGS, NULL},
    {"begin", (PyCFunction)(void (*)(void))begin, METH_FASTCALL, NULL},
    {"end", (PyCFunction)(void (*)(void))end, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef members[] = {
    {"next", (getter)get_next, NULL, NULL, NULL},
    {"ended", (getter)get_ended, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, drop}, {Py_tp_methods, methods}, {Py_tp_getset, members}, {0, NULL},
};
static PyType_Spec spec = {"perseus_client._marks.Marks", sizeof(Marks), 0, Py_TPFLAGS_DEFAULT, slots};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_marks", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__marks(void) {
    PyObject *made = PyModule_Create(&module);
    PyObject *marks = PyType_FromSpec(&spec), *stream_writes = PyType_FromSpec(&stream_write_spec);
    if (made == NULL || marks == NULL || stream_writes == NULL || PyModule_AddObjectRef(made, "Marks", marks) < 0 ||
        PyModule_AddObjectRef(made, "StreamWrite", stream_writes) < 0) {
        Py_XDECREF(made);
        made = NULL;
    }
    Py_XDECREF(marks);
    Py_XDECREF(stream_writes);
    return made;
}
