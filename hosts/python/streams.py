"""A program that uses two backends of one GPU through ggml's functions, step by step.

    python3 streams.py LIBRARIES STEP ...

The backends are streams `a` and `b`. There is one tensor of device memory, `weights`, one
that is computed from it, and one event. A step with `other/` before it is made by another
thread; the program waits until it was made, which orders the threads, not the streams.

    copy:S     copies to `weights`, asynchronously
    compute:S  computes
    read:S     copies the result to the host, asynchronously
    record:S   records the event
    wait:S     waits for the event, in the stream
    sync:S     waits for the stream
    event      waits for the event
    set, get   copy to `weights` and from the result, synchronously
    lock       page-locks the memory that is copied
    free       frees the device memory
    move       gives `weights` the address of the result
    retype     gives `weights` another type
"""

import concurrent.futures
import ctypes as c
import glob
import os
import sys

COUNT = 1 << 18
BYTES = 4 * COUNT
# Of a tensor: where its address is, and a type of numbers of the same size.
DATA, I32 = 248, 26

folder, *steps = sys.argv[1:]
(base_path,) = glob.glob(os.path.join(folder, "libggml-base*.so"))
(ggml_path,) = glob.glob(os.path.join(folder, "libggml.v*.so"))
base, ggml = c.CDLL(base_path), c.CDLL(ggml_path)


class Init(c.Structure):
    """struct ggml_init_params."""

    _fields_ = [("size", c.c_size_t), ("memory", c.c_void_p), ("no_alloc", c.c_bool)]


def function(library, name, result, *arguments):
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


P, SIZE = c.c_void_p, c.c_size_t
by_name = function(ggml, "ggml_backend_dev_by_name", P, c.c_char_p)
start = function(base, "ggml_backend_dev_init", P, P, P)
init = function(base, "ggml_init", P, Init)
new_tensor = function(base, "ggml_new_tensor_1d", P, P, c.c_int, c.c_int64)
scale = function(base, "ggml_scale", P, P, P, c.c_float)
new_graph = function(base, "ggml_new_graph", P, P)
expand = function(base, "ggml_build_forward_expand", None, P, P)
set_name = function(base, "ggml_set_name", P, P, c.c_char_p)
buffer_type = function(base, "ggml_backend_dev_buffer_type", P, P)
alloc = function(base, "ggml_backend_alloc_ctx_tensors_from_buft", P, P, P)
free = function(base, "ggml_backend_buffer_free", None, P)
copy = function(base, "ggml_backend_tensor_set_async", None, P, P, P, SIZE, SIZE)
read = function(base, "ggml_backend_tensor_get_async", None, P, P, P, SIZE, SIZE)
compute = function(base, "ggml_backend_graph_compute_async", c.c_int, P, P)
synchronize = function(base, "ggml_backend_synchronize", None, P)
event_new = function(base, "ggml_backend_event_new", P, P)
record = function(base, "ggml_backend_event_record", None, P, P)
wait = function(base, "ggml_backend_event_wait", None, P, P)
event_synchronize = function(base, "ggml_backend_event_synchronize", None, P)
tensor_set = function(base, "ggml_backend_tensor_set", None, P, P, SIZE, SIZE)
tensor_get = function(base, "ggml_backend_tensor_get", None, P, P, SIZE, SIZE)
registry = function(base, "ggml_backend_dev_backend_reg", P, P)
address = function(base, "ggml_backend_reg_get_proc_address", P, P, c.c_char_p)

function(ggml, "ggml_backend_load_all_from_path", None, c.c_char_p)(folder.encode())
device = by_name(b"SIM0")
assert device, "no simulated GPU"
streams = {name: start(device, None) for name in "ab"}
context = init(Init(1 << 20, None, True))
weights = new_tensor(context, 0, COUNT)
set_name(weights, b"weights")
result = scale(context, weights, 2.0)
set_name(result, b"result")
graph = new_graph(context)
expand(graph, result)
buffer = alloc(context, buffer_type(device))
assert buffer, "no device memory"
event = event_new(device)
source = (c.c_float * COUNT)(*([1.5] * COUNT))
target = (c.c_float * COUNT)()


def lock():
    function = address(registry(device), b"ggml_backend_register_host_buffer")
    for memory in source, target:
        assert c.CFUNCTYPE(c.c_bool, P, SIZE)(function)(c.addressof(memory), BYTES)


def change(offset, field, value):
    """Changes a field of `weights`, a struct ggml_tensor."""
    field.from_address(weights + offset).value = value


ACTIONS = {
    "copy": lambda stream: copy(stream, weights, source, 0, BYTES),
    "compute": lambda stream: compute(stream, graph),
    "read": lambda stream: read(stream, result, target, 0, BYTES),
    "record": lambda stream: record(event, stream),
    "wait": lambda stream: wait(stream, event),
    "sync": synchronize,
    "event": lambda _: event_synchronize(event),
    "set": lambda _: tensor_set(weights, source, 0, BYTES),
    "get": lambda _: tensor_get(result, target, 0, BYTES),
    "lock": lambda _: lock(),
    "free": lambda _: free(buffer),
    "move": lambda _: change(DATA, c.c_void_p, P.from_address(result + DATA).value),
    "retype": lambda _: change(0, c.c_int, I32),
}


def make(step):
    action, _, stream = step.partition(":")
    ACTIONS[action](streams.get(stream))


with concurrent.futures.ThreadPoolExecutor(1) as other:
    for step in steps:
        if step.startswith("other/"):
            other.submit(make, step.removeprefix("other/")).result()
        else:
            make(step)
print(target[0], target[COUNT - 1])
