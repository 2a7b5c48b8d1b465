"""A host without a reference to llama-sidecar: Python, llama.cpp through ctypes.

    python3 host.py LIBRARIES MODEL [count] [gates] [experts-on-cpu] [on-cpu=PATTERN] [tokens=N] [part=N] [sequences=N]
                    [own-cache=MIB] [second-gpu]

With `experts-on-cpu`, routed experts stay in host memory, as llama.cpp's flag -cmoe has it;
with `on-cpu`, the tensors whose names match. With `tokens`, a context has N tokens and
evaluates so many in one batch; with `part`, it evaluates a prompt in parts of N tokens. With
`own-cache`, experts have the cache of newer versions of llama.cpp, as its flag
--moe-cache-mib has it; with `second-gpu`, the last layers are on a second simulated GPU.
LIBRARIES is the folder of libllama and its companions, of node-llama-cpp or of llama.cpp from
source. The variable HOST_PLAIN_BUFFERS keeps
weights out of the CPU's special buffer types (CPU_REPACK, AMX), as llama.cpp's flag --no-repack
does. Takes the same commands on standard input as hosts/node/host.mjs, and

    both N   two texts at the same time, each in a context and a thread of its own
    prompt N a prompt of N tokens in one batch, which are the same each time; then the tokens
             of `more` follow. A hash of its logits
    hashes N N tokens, as `more`; a hash of the logits of all
    fails C  `failed`, if the command C fails
    report P writes the report of the simulated GPU to a file
    warm     evaluates one token the way programs warm a model up
    routes   with `count`: the experts of each layer and token, with `gates` also their gate
             weights and the norms of their weighted outputs; JSON
    several N two sequences of N tokens in one batch, of which only the last token of the first
             and the token before the last of the second have an output
    counts   with `count`: which experts were used, counted through the callback that
             llama.cpp offers for looking at an evaluation; JSON
    fork     forks a child that evaluates once and ends, and one that is terminated; the
             exit code of the first

The libraries are loaded with local scope, the way bindings do it, and functions are
called by handle, past everything that the dynamic linker could interpose.
"""

import concurrent.futures
import ctypes as c
import glob
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time

PROMPT = b"The capital of France is"


class Params(c.Structure):
    """Parameters, passed and returned by value. Larger than the library's struct, which
    reads and writes only its own part of it."""

    _fields_ = [("words", c.c_uint32 * 128)]


class Batch(c.Structure):
    """struct llama_batch."""

    _fields_ = [("n_tokens", c.c_int32)] + [
        (name, c.c_void_p)
        for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")
    ]


def library(folder, name):
    """A library: NAME.so where llama.cpp was built from source, NAME.vVERSION.so in packages
    of node-llama-cpp."""
    (path,) = [
        path
        for pattern in (f"{name}.so", f"{name}.v*.so")
        for path in glob.glob(os.path.join(folder, pattern))
    ]
    return c.CDLL(path)


folder, model_path, *options = sys.argv[1:]
base = library(folder, "libggml-base")
ggml = library(folder, "libggml")
llama = library(folder, "libllama")
for name in (
    "llama_model_load_from_file",
    "llama_init_from_model",
    "llama_model_get_vocab",
    "llama_get_memory",
):
    getattr(llama, name).restype = c.c_void_p
llama.llama_model_default_params.restype = Params
llama.llama_context_default_params.restype = Params
llama.llama_get_logits_ith.restype = c.POINTER(c.c_float)
llama.llama_batch_get_one.restype = Batch
llama.llama_batch_get_one.argtypes = [c.c_void_p, c.c_int32]
llama.llama_decode.argtypes = [c.c_void_p, Batch]
llama.llama_synchronize.argtypes = [c.c_void_p]
llama.llama_memory_clear.argtypes = [c.c_void_p, c.c_bool]
QUIET = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(lambda *_: None)
llama.llama_log_set(QUIET, None)
ggml.ggml_backend_load_all_from_path(folder.encode())
if "second-gpu" in options:
    # A copy of the simulated GPU is another one, with a report of its own.
    os.environ["SIM_GGML_REPORT"] += ".2"
    second = os.environ["SIM_GGML_REPORT"] + ".so"
    shutil.copy(os.environ["GGML_BACKEND_PATH"], second)
    ggml.ggml_backend_load.restype = c.c_void_p
    assert ggml.ggml_backend_load(second.encode())


base.ggml_get_name.restype = c.c_char_p
base.ggml_get_name.argtypes = [c.c_void_p]
base.ggml_backend_tensor_get.argtypes = [c.c_void_p, c.c_void_p, c.c_size_t, c.c_size_t]
NE, NB = 16, 48  # offsets in struct ggml_tensor
EXTRA_BUFTS = 18  # place of use_extra_bufts, among other flags, in llama_model_params, in words
CB_EVAL = 22  # place of cb_eval in llama_context_params, in words
OWN_CACHE = 28  # place of moe_cache_size in llama_context_params, in words
counts = {}
routes = {}
gates = {}
norms = {}


def option(name):
    """The value of an option, or None."""
    given = [text.split("=", 1)[1] for text in options if text.startswith(name + "=")]
    return given[-1] if given else None


@c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_bool, c.c_void_p)
def look(tensor, ask, _):
    """Called before each node, whether it is of interest, and after those that are."""
    name = base.ggml_get_name(tensor)
    # Views of these have an addition in brackets.
    if "gates" in options and not name.endswith(b")"):
        if name.startswith(b"ffn_moe_weights_norm-"):
            return look_at_gates(tensor, ask, int(name.split(b"-")[1]))
        if name.startswith(b"ffn_moe_weighted-"):
            return look_at_outputs(tensor, ask, int(name.split(b"-")[1]))
    if not name.startswith(b"ffn_moe_topk-"):
        return not ask
    used, tokens = (c.c_int64 * 2).from_address(tensor + NE)
    # The last layer has no tokens for a part of a prompt that needs no result.
    if not ask and tokens > 0:
        stride, row = (c.c_size_t * 2).from_address(tensor + NB)
        size = (tokens - 1) * row + (used - 1) * stride + 4
        bytes_ = (c.c_uint8 * size)()
        base.ggml_backend_tensor_get(tensor, bytes_, 0, size)
        layer = counts.setdefault(int(name.split(b"-")[1]), {})
        kept = routes.setdefault(int(name.split(b"-")[1]), [])
        for token in range(tokens):
            kept.append([])
            for place in range(used):
                expert = c.c_int32.from_buffer(bytes_, token * row + place * stride).value
                layer[expert] = layer.get(expert, 0) + 1
                kept[-1].append(expert)
    return True


def look_at_gates(tensor, ask, layer):
    """Keeps the gate weights of a layer."""
    used, tokens = (c.c_int64 * 2).from_address(tensor + NE)
    if not ask and tokens > 0:
        weights = (c.c_float * (used * tokens))()
        base.ggml_backend_tensor_get(tensor, weights, 0, 4 * used * tokens)
        kept = gates.setdefault(layer, [])
        kept += [list(weights[at : at + used]) for at in range(0, used * tokens, used)]
    return True


def look_at_outputs(tensor, ask, layer):
    """Keeps the norm of each output of an expert after its multiplication with the gate weight."""
    width, used, tokens = (c.c_int64 * 3).from_address(tensor + NE)
    if not ask and tokens > 0:
        values = (c.c_float * (width * used * tokens))()
        base.ggml_backend_tensor_get(tensor, values, 0, c.sizeof(values))
        rows = [values[at : at + width] for at in range(0, len(values), width)]
        lengths = [math.hypot(*row) for row in rows]
        kept = norms.setdefault(layer, [])
        kept += [lengths[at : at + used] for at in range(0, len(lengths), used)]
    return True


class Context:
    """One llama_context and the text it is writing."""

    def __init__(self, model, tokens=option("tokens")):
        params = llama.llama_context_default_params()
        assert params.words[0] == 512 and list(params.words[7:9]) == [4, 4]
        params.words[0] = 256  # n_ctx
        if tokens:
            # n_ctx, n_batch, n_ubatch
            params.words[0] = params.words[1] = params.words[2] = int(tokens)
        if sequences := option("sequences"):
            assert params.words[3] == 1
            params.words[3] = int(sequences)  # n_seq_max
        if part := option("part"):
            params.words[2] = int(part)  # n_ubatch
        # n_threads, n_threads_batch: two contexts at a time do not fight over two cores.
        params.words[7] = params.words[8] = 1
        if "count" in options:
            params.words[2] = int(part or 4)  # n_ubatch: a prompt is read in parts
            callback = c.cast(look, c.c_void_p).value
            params.words[CB_EVAL] = callback & 0xFFFFFFFF
            params.words[CB_EVAL + 1] = callback >> 32
        if mib := option("own-cache"):
            assert hasattr(base, "ggml_backend_sched_set_copy_callback"), "no cache of its own"
            # GGML_TYPE_F16 for keys and values, before it.
            assert list(params.words[OWN_CACHE - 2 : OWN_CACHE + 2]) == [1, 1, 0, 0]
            size = int(mib) << 20
            params.words[OWN_CACHE] = size & 0xFFFFFFFF
            params.words[OWN_CACHE + 1] = size >> 32
        self.context = c.c_void_p(llama.llama_init_from_model(model, params))
        assert self.context, "no context"
        self.vocab = c.c_void_p(llama.llama_model_get_vocab(model))
        self.size = llama.llama_vocab_n_tokens(self.vocab)
        self.hash = None

    def decode(self, tokens):
        array = (c.c_int32 * len(tokens))(*tokens)
        code = llama.llama_decode(
            self.context, llama.llama_batch_get_one(array, len(tokens))
        )
        assert code == 0, code
        logits = llama.llama_get_logits_ith(self.context, c.c_int32(-1))
        if self.hash:
            self.hash.update(c.string_at(logits, 4 * self.size))
        return max(range(self.size), key=logits.__getitem__)

    def write(self, tokens, count):
        written = []
        while len(written) < count:
            tokens = [self.decode(tokens)]
            written += tokens
        self.last = tokens
        return " ".join(map(str, written))

    def forget(self):
        llama.llama_memory_clear(c.c_void_p(llama.llama_get_memory(self.context)), True)

    def hashed(self, tokens, count):
        self.hash = hashlib.blake2b(digest_size=8)
        self.write(tokens, count)
        return self.hash.hexdigest()

    def text(self, count):
        self.forget()
        tokens = (c.c_int32 * 64)()
        found = llama.llama_tokenize(
            self.vocab, PROMPT, len(PROMPT), tokens, 64, c.c_bool(False), c.c_bool(False)
        )
        return self.write(tokens[:found], count)


class Override(c.Structure):
    """struct llama_model_tensor_buft_override."""

    _fields_ = [("pattern", c.c_char_p), ("buffer_type", c.c_void_p)]


base.ggml_backend_cpu_buffer_type.restype = c.c_void_p
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_exps" if "experts-on-cpu" in options else None
PATTERN = option("on-cpu") or EXPERTS
ON_CPU = (Override * 2)()


def model_params():
    params = llama.llama_model_default_params()
    if PATTERN:
        ON_CPU[0] = Override(PATTERN.encode(), base.ggml_backend_cpu_buffer_type())
        address = c.addressof(ON_CPU)
        # tensor_buft_overrides, the second pointer
        params.words[2] = address & 0xFFFFFFFF
        params.words[3] = address >> 32
    if os.environ.get("HOST_PLAIN_BUFFERS"):
        assert params.words[EXTRA_BUFTS] == 1 << 16, "another version of llama.cpp"
        params.words[EXTRA_BUFTS] = 0
    return params


class Host:
    def load(self, path):
        self.model = c.c_void_p(
            llama.llama_model_load_from_file(path.encode(), model_params())
        )
        assert self.model, path
        self.contexts = [Context(self.model)]
        return "loaded"

    def text(self, count):
        return self.contexts[0].text(int(count))

    def more(self, count):
        return self.contexts[0].write(self.contexts[0].last, int(count))

    def prompt(self, count):
        context = self.contexts[0]
        context.forget()
        return context.hashed([place * 7 % context.size for place in range(int(count))], 1)

    def hashes(self, count):
        return self.contexts[0].hashed(self.contexts[0].last, int(count))

    def fails(self, command, *arguments):
        try:
            return getattr(self, command)(*arguments)
        except AssertionError:
            return "failed"

    def report(self, path):
        simulation = c.CDLL(os.environ["GGML_BACKEND_PATH"])
        assert simulation.sim_ggml_report(path.encode())
        return "written"

    def context(self, tokens):
        self.contexts.append(Context(self.model, tokens))
        return "made"

    def both(self, count):
        if len(self.contexts) == 1:
            self.contexts.append(Context(self.model))
        with concurrent.futures.ThreadPoolExecutor() as threads:
            texts = threads.map(lambda context: context.text(int(count)), self.contexts)
            return " | ".join(texts)

    def several(self, count):
        """Two sequences in one batch."""
        context, count = self.contexts[0], int(count)
        context.forget()
        array = lambda kind, values: (kind * len(values))(*values)
        both = range(2 * count)
        sequences = [array(c.c_int32, [place // count]) for place in both]
        fields = (
            array(c.c_int32, [place * 7 % context.size for place in both]),
            None,
            array(c.c_int32, [place % count for place in both]),
            array(c.c_int32, [1 for _ in both]),
            array(c.c_void_p, [c.addressof(sequence) for sequence in sequences]),
            array(c.c_int8, [place in (count - 1, 2 * count - 2) for place in both]),
        )
        pointers = (c.cast(field, c.c_void_p) for field in fields)
        code = llama.llama_decode(context.context, Batch(2 * count, *pointers))
        assert code == 0, code
        llama.llama_synchronize(context.context)
        return "evaluated"

    def warm(self):
        context = self.contexts[0]
        llama.llama_set_warmup(context.context, c.c_bool(True))
        context.forget()
        context.decode([1])
        llama.llama_set_warmup(context.context, c.c_bool(False))
        return "warm"

    def routes(self):
        return json.dumps({"routes": routes, "gates": gates, "norms": norms})

    def counts(self):
        return json.dumps(counts)

    def free(self):
        for context in self.contexts:
            llama.llama_free(context.context)
        llama.llama_model_free(self.model)
        return "freed"

    def fork(self):
        child = os.fork()
        if child == 0:
            self.more(1)
            c.CDLL(None).exit(7)  # with everything that runs at the end of a process
        other = os.fork()
        if other == 0:
            while True:
                time.sleep(1)
        os.kill(other, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == -signal.SIGTERM
        return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


host = Host()
host.load(model_path)
print("ready", flush=True)
for line in sys.stdin:
    command, *arguments = line.split()
    if command == "end":
        break
    print(getattr(host, command)(*arguments), flush=True)
