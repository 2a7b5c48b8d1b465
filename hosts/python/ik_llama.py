"""A host without a reference to llama-sidecar: ik_llama.cpp through its Python bindings
(PyPI: ik-llama-cpp-python).

    ik_llama.py MODEL [count] [tokens=N] [threads=N] [repack] [merge-qkv] [merge-up-gate]
                      [no-mmap] [no-fusion] [no-reuse]

`count` counts experts through the callback that ik_llama.cpp offers for looking at an
evaluation. `tokens=N` sets the size of the context and of a batch, `threads=N` the number of
threads. `repack`, `merge-qkv` and `merge-up-gate` set the parameters of these names, which alter
weights while they are loaded. `no-fusion` turns off the nodes that read several weights,
`no-reuse` the use of a graph for several tokens. Takes commands on standard input:

    text N    N tokens after a prompt, and a hash of the logits of all steps
    more N    N tokens after the last one, and a hash
    prompt N  a prompt of N tokens in one batch, and a hash of its logits
    counts    with `count`: which experts were used, by layer; JSON
    load P    loads another model; the commands above mean the last one
    use N     lets the commands mean the model that was loaded as number N, from 0
    reload    calls `llama_reload_changed_tensors`, where any library has it
    free      frees the model
"""

import ctypes as c
import hashlib
import json
import sys

from ik_llama_cpp import _ctypes_api as ik

PROMPT = b"The capital of France is"
model_path, *options = sys.argv[1:]
QUIET = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(lambda *_: None)
ik._lib.llama_log_set(QUIET, None)


def in_libllama(name, result, *arguments):
    function = getattr(ik._lib, name)
    function.restype, function.argtypes = result, arguments
    return function


get_name = in_libllama("ggml_get_name", c.c_char_p, c.c_void_p)
tensor_get = in_libllama(
    "ggml_backend_tensor_get", None, c.c_void_p, c.c_void_p, c.c_size_t, c.c_size_t
)
NE, NB = 16, 48  # offsets in struct ggml_tensor
counts = {}


@ik.ggml_backend_sched_eval_callback
def look(tensor, ask, _):
    """Called before each node, whether it is of interest, and after those that are."""
    name = get_name(tensor)
    if not name.startswith(b"ffn_moe_topk-"):
        return not ask
    used, tokens = (c.c_int64 * 2).from_address(tensor + NE)
    if not ask and tokens > 0:
        stride, row = (c.c_size_t * 2).from_address(tensor + NB)
        size = (tokens - 1) * row + (used - 1) * stride + 4
        data = (c.c_uint8 * size)()
        tensor_get(tensor, data, 0, size)
        layer = counts.setdefault(int(name.split(b"-")[1]), {})
        for token in range(tokens):
            for place in range(used):
                expert = c.c_int32.from_buffer(data, token * row + place * stride).value
                layer[expert] = layer.get(expert, 0) + 1
    return True


def option(name, otherwise):
    given = [text.split("=", 1)[1] for text in options if text.startswith(name + "=")]
    return given[-1] if given else otherwise


class Model:
    """A model, a context, and the text that it is writing."""

    def __init__(self, path):
        params = ik.llama_model_default_params()
        params.use_mmap = "no-mmap" not in options
        params.repack_tensors = "repack" in options
        params.merge_qkv = "merge-qkv" in options
        params.merge_up_gate_exps = "merge-up-gate" in options
        self.model = ik.llama_model_load_from_file(path.encode(), params)
        assert self.model, path
        params = ik.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = int(option("tokens", 256))
        params.n_threads = params.n_threads_batch = int(option("threads", 1))
        if "no-fusion" in options:
            params.fused_moe_up_gate = params.fused_up_gate = params.fused_mmad = False
        params.graph_reuse = "no-reuse" not in options
        if "count" in options:
            params.cb_eval = look
        self.context = ik.llama_init_from_model(self.model, params)
        assert self.context, "no context"
        self.size = ik.llama_vocab_n_tokens(ik.llama_model_get_vocab(self.model))
        self.last, self.position = [], 0

    def decode(self, tokens):
        batch = ik.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            batch.token[at] = token
            batch.pos[at] = self.position + at
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = 0
            batch.logits[at] = at + 1 == len(tokens)
        code = ik.llama_decode(self.context, batch)
        ik.llama_batch_free(batch)
        assert code == 0, code
        self.position += len(tokens)
        logits = ik.llama_get_logits_ith(self.context, -1)
        self.hash.update(c.string_at(logits, 4 * self.size))
        return max(range(self.size), key=logits.__getitem__)

    def write(self, tokens, count):
        self.hash = hashlib.blake2b(digest_size=8)
        written = []
        while len(written) < count:
            tokens = [self.decode(tokens)]
            written += tokens
        self.last = tokens
        return " ".join([*map(str, written), self.hash.hexdigest()])

    def forget(self):
        ik.llama_kv_cache_clear(self.context)
        self.position = 0

    def free(self):
        ik.llama_free(self.context)
        ik.llama_free_model(self.model)


class Host:
    def __init__(self):
        self.models = []

    def load(self, path):
        self.models.append(Model(path))
        self.current = self.models[-1]
        return "loaded"

    def use(self, number):
        self.current = self.models[int(number)]
        return "used"

    def text(self, count):
        tokens = (c.c_int32 * 64)()
        found = ik.llama_tokenize(
            self.current.model, PROMPT, len(PROMPT), tokens, 64, False, False
        )
        self.current.forget()
        return self.current.write(tokens[:found], int(count))

    def more(self, count):
        return self.current.write(self.current.last, int(count))

    def prompt(self, count):
        self.current.forget()
        tokens = [place * 7 % self.current.size for place in range(int(count))]
        return self.current.write(tokens, 1)

    def counts(self):
        return json.dumps(counts)

    def reload(self):
        try:
            function = c.CDLL(None).llama_reload_changed_tensors
        except AttributeError:
            return "missing"
        function.restype, function.argtypes = c.c_bool, [c.c_void_p]
        return "changed" if function(self.current.context) else "unchanged"

    def free(self):
        self.current.free()
        self.models.remove(self.current)
        return "freed"


host = Host()
host.load(model_path)
print("ready", flush=True)
for line in sys.stdin:
    command, *arguments = line.split()
    if command == "end":
        break
    print(getattr(host, command)(*arguments), flush=True)
