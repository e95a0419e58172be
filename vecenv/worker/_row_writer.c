/* Writes results of env.step into shared memory, if the types of their values are the usual ones and no episode ends. Every
   other result is refused and left to the Python code in rows.py, which alone defines the semantics. See row_writer.py. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define INTERFACE 1 /* row_writer.py requires this number: a module built from older sources may still be installed */
#define C_CONTIGUOUS 1

/* The first fields of every numpy.ndarray, at the offsets that the macros of NumPy 1 and 2 compile into all extensions.
   Requesting an array's buffer instead would take longer than the rest of a write. row_writer.py verifies the fields. */
typedef struct {
    PyObject_HEAD
    char *data;
    int axes;
    Py_ssize_t *shape, *strides;
    PyObject *base, *dtype;
    int flags;
} Array;

typedef struct {
    PyObject *key, *example;
    Py_ssize_t offset, size; /* in a record */
} Column;

enum { OBSERVATION, REWARD, TERMINATED, TRUNCATED, SCHEMA, RECORD, CELLS };

typedef struct {
    PyObject_HEAD
    PyObject *known, *infos; /* tuples that keep the objects below alive */
    Py_buffer cells[CELLS];
    PyTypeObject *array, *float32, *float64;
    PyObject *numpy_false;
    Column observation;
    unsigned long long schema;
    Py_ssize_t count;
    Column *columns; /* of an info */
} Row;

/* The copy functions return 0 if they refuse a value. */
static int copy_array(const Column *column, PyObject *value, void *to)
{
    const Array *a = (Array *)value, *b = (Array *)column->example;
    if (!(a->flags & C_CONTIGUOUS) || a->axes != b->axes)
        return 0;
    for (int i = 0; i < a->axes; i++)
        if (a->shape[i] != b->shape[i])
            return 0;
    if (a->dtype != b->dtype && PyObject_RichCompareBool(a->dtype, b->dtype, Py_EQ) != 1) /* unpickled dtypes are copies */
        return 0;
    memmove(to, a->data, column->size); /* memmove, because an environment may return the row itself */
    return 1;
}

static int copy(Row *self, const Column *column, PyObject *value, void *to)
{
    PyTypeObject *type = Py_TYPE(value);
    if (type != Py_TYPE(column->example))
        return 0;
    if (type == self->array)
        return copy_array(column, value, to);
    if (type == &PyFloat_Type || type == self->float64) {
        double number = PyFloat_AsDouble(value);
        memcpy(to, &number, sizeof number);
    } else if (type == &PyLong_Type) {
        int overflow;
        int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
        memcpy(to, &number, sizeof number);
        return !overflow;
    } else if (type == &PyBool_Type) {
        *(char *)to = value == Py_True;
    } else { /* another scalar of NumPy */
        Py_buffer view;
        if (PyObject_GetBuffer(value, &view, PyBUF_SIMPLE) < 0)
            return 0;
        memcpy(to, view.buf, column->size);
        PyBuffer_Release(&view);
    }
    return 1;
}

static int copy_info(Row *self, PyObject *info)
{
    Py_ssize_t position = 0;
    PyObject *key, *value;
    for (const Column *c = self->columns; PyDict_Next(info, &position, &key, &value); c++) {
        int same = key == c->key || (Py_TYPE(key) == Py_TYPE(c->key) && PyObject_RichCompareBool(key, c->key, Py_EQ) == 1);
        if (!same || !copy(self, c, value, (char *)self->cells[RECORD].buf + c->offset))
            return 0;
    }
    return 1;
}

static int copy_result(Row *self, PyObject *result)
{
    PyObject *values[5], *numpy_false = self->numpy_false;
    if (Py_TYPE(result) != &PyTuple_Type || PyTuple_Size(result) != 5)
        return 0;
    for (int i = 0; i < 5; i++)
        values[i] = PyTuple_GetItem(result, i);
    /* the end of an episode, or a flag that is not a bool, is left to Python */
    if ((values[2] != Py_False && values[2] != numpy_false) || (values[3] != Py_False && values[3] != numpy_false))
        return 0;
    PyTypeObject *type = Py_TYPE(values[1]);
    int number = type == &PyFloat_Type || type == &PyLong_Type || type == self->float64 || type == self->float32;
    double reward = number ? PyFloat_AsDouble(values[1]) : 0;
    if (!number || (reward == -1.0 && PyErr_Occurred()) || Py_TYPE(values[4]) != &PyDict_Type)
        return 0;
    Py_ssize_t size = PyDict_Size(values[4]);
    if (size && (size != self->count || !copy_info(self, values[4])))
        return 0;
    if (!copy(self, &self->observation, values[0], self->cells[OBSERVATION].buf))
        return 0;
    *(double *)self->cells[REWARD].buf = reward;
    *(char *)self->cells[TERMINATED].buf = *(char *)self->cells[TRUNCATED].buf = 0;
    if (size)
        *(uint64_t *)self->cells[SCHEMA].buf = self->schema;
    return size ? 2 : 1;
}

/* write(result) returns 0 if it refuses, 1 if it has written the result, and 2 if it has also written an info. */
static PyObject *write_row(Row *self, PyObject *result)
{
    int written = copy_result(self, result);
    if (!written)
        PyErr_Clear();
    return PyLong_FromLong(written);
}

/* learn(number, columns): accept infos like these columns, in keys, types and shapes; the number identifies their schema. */
static PyObject *learn(Row *self, PyObject *arguments)
{
    PyObject *infos, *before = self->infos;
    if (!PyArg_ParseTuple(arguments, "KO!", &self->schema, &PyTuple_Type, &infos))
        return NULL;
    self->infos = Py_NewRef(infos);
    Py_XDECREF(before);
    PyMem_Free(self->columns);
    self->count = 0;
    self->columns = PyMem_Calloc(PyTuple_Size(infos) + 1, sizeof(Column));
    for (Column *c = self->columns; c && self->count < PyTuple_Size(infos); c++, self->count++)
        if (!PyArg_ParseTuple(PyTuple_GetItem(infos, self->count), "OOnn", &c->key, &c->example, &c->offset, &c->size)) {
            self->count = 0;
            return NULL;
        }
    return self->columns ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

static void dealloc(Row *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (int i = 0; i < CELLS; i++)
        PyBuffer_Release(&self->cells[i]);
    PyMem_Free(self->columns);
    Py_XDECREF(self->infos);
    Py_XDECREF(self->known);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *create(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    PyObject *cells[CELLS];
    Row *self = (Row *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    int failed = !self || !(self->known = Py_NewRef(arguments))
        || !PyArg_ParseTuple(arguments, "(OOOOOO)(OOOO)", &cells[0], &cells[1], &cells[2], &cells[3], &cells[4], &cells[5],
                             &self->array, &self->float32, &self->float64, &self->numpy_false);
    for (int i = 0; !failed && i < CELLS; i++)
        failed = PyObject_GetBuffer(cells[i], &self->cells[i], PyBUF_CONTIG) < 0;
    if (failed)
        Py_XDECREF((PyObject *)self);
    else
        self->observation = (Column){NULL, cells[OBSERVATION], 0, self->cells[OBSERVATION].len};
    return failed ? NULL : (PyObject *)self;
}

static PyObject *fields(PyObject *Py_UNUSED(module), PyObject *array)
{
    const Array *a = (Array *)array;
    return Py_BuildValue("NiNi", PyLong_FromVoidPtr(a->data), a->axes, PyLong_FromVoidPtr(a->dtype), a->flags);
}

static PyMethodDef methods[] = {{"write", (PyCFunction)write_row, METH_O}, {"learn", (PyCFunction)learn, METH_VARARGS}, {0}};
static PyMethodDef functions[] = {{"fields", fields, METH_O}, {0}};
static PyType_Slot slots[] = {{Py_tp_new, create}, {Py_tp_dealloc, dealloc}, {Py_tp_methods, methods}, {0}};
static PyType_Spec spec = {"vecenv.worker._row_writer.Row", sizeof(Row), 0, Py_TPFLAGS_DEFAULT, slots};

static int fill(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    int failed = !type || PyModule_AddObjectRef(module, "Row", type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
}

static PyModuleDef_Slot phases[] = {{Py_mod_exec, fill}, {0}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_row_writer", .m_methods = functions, .m_slots = phases};

PyMODINIT_FUNC PyInit__row_writer(void) { return PyModuleDef_Init(&definition); }
