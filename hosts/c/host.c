// A host without a reference to llama-sidecar: C, linked with libllama.
//
//   host LIBRARIES MODEL
//
// Takes the same commands on standard input as hosts/node/host.mjs, and
//
//   reload    calls llama_reload_changed_tensors where a library has it, as programs
//             made for ik_llama.cpp do
//   use LAYERS USED NEW
//             lets a token use NEW experts, instead of USED, in each of the layers of the model
//   warmup    evaluates the prompt in the warm-up mode of llama.cpp
//   force N   evaluates the next N tokens of a fixed text, one at a time; the answer
//             has the ms of a token, its major page faults and a hash of all logits
//   context N makes another context of N tokens, which stays
//   cycle N   frees the model, and loads it and evaluates a token N times; the last one stays
//   both N    frees the model and loads it again; then two threads make a context each at the
//             same time, and evaluate the first tokens of the text N times. The hashes of all
//   chain     handles SIGTERM from here on, calls the handler before, and raises the signal
//   own       puts memory with the same bytes in place of the mappings of .gguf files
//   close FILE
//             closes all descriptors from 3 on, as closefrom does, and opens FILE in place of each
//   prefill N evaluates the first N tokens of the text in one batch; `force` goes on
//             after them
//
// HOST_THREADS sets the number of threads, 1 by default, and HOST_CONTEXT the size of the
// context, 256 by default. HOST_ROUTES names a file for the experts of each evaluation: a
// line `evaluation`, and one line for each layer and token, the layer before the experts.
// HOST_READ_AT_MATMUL makes the program read experts as ik_llama.cpp does. HOST_EXPERTS_ON_CPU
// keeps routed experts in host memory, and all else on the GPU. HOST_PLAIN_BUFFERS keeps weights
// out of the CPU's special buffer types (CPU_REPACK, AMX), as llama.cpp's flag --no-repack does.
// HOST_OVERRIDE replaces a number of the metadata, as llama.cpp's flag --override-kv does: KEY=NUMBER.
#include <fcntl.h>
#include <inttypes.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "read_at_matmul.h"

// From llama.h, as far as it is used. Parameters are passed and returned by value;
// these are larger than the library's structs, which read and write only their own
// part.
struct params {
    uint32_t words[128];
};
struct llama_batch {
    int32_t n_tokens;
    void * arrays[6];
};
struct llama_model_tensor_buft_override {
    const char * pattern;
    struct ggml_backend_buffer_type * buft;
};
struct llama_model_kv_override {
    int32_t tag; // 0: a whole number
    char key[128];
    union {
        int64_t number;
        char text[128];
    };
};
struct llama_model;
struct llama_context;
struct llama_vocab;
struct llama_memory_i;

struct params llama_model_default_params(void);
struct params llama_context_default_params(void);
struct llama_model * llama_model_load_from_file(const char * path, struct params params);
struct llama_context * llama_init_from_model(struct llama_model * model, struct params params);
const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
int32_t llama_vocab_n_tokens(const struct llama_vocab * vocab);
int32_t llama_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len,
                       int32_t * tokens, int32_t n_tokens_max, bool add_special,
                       bool parse_special);
struct llama_batch llama_batch_get_one(int32_t * tokens, int32_t n_tokens);
int32_t llama_decode(struct llama_context * context, struct llama_batch batch);
float * llama_get_logits_ith(struct llama_context * context, int32_t i);
struct llama_memory_i * llama_get_memory(const struct llama_context * context);
void llama_memory_clear(struct llama_memory_i * memory, bool data);
void llama_free(struct llama_context * context);
void llama_model_free(struct llama_model * model);
void llama_log_set(void (*callback)(int, const char *, void *), void * user_data);
void ggml_backend_load_all_from_path(const char * path);
struct ggml_backend_buffer_type * ggml_backend_cpu_buffer_type(void);
void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);

// ik_llama.cpp has this function; a program may look it up without needing it.
bool llama_reload_changed_tensors(struct llama_context * context) __attribute__((weak));
// Later versions of llama.cpp may lack this one.
void llama_set_warmup(struct llama_context * context, bool warmup) __attribute__((weak));

static struct llama_model * model;
static struct llama_context * context;
static int32_t last;
static FILE * routes;
// The tokens of the fixed text.
static int32_t text[4096];
static int32_t n_text;
// The token of the text that `force` evaluates next.
static int32_t next;

static void quiet(int level, const char * text, void * user_data) {
    (void) level, (void) text, (void) user_data;
}

// Writes the experts of a layer. llama.cpp calls it before each node, whether the node is of
// interest, and after those that are.
static bool write_route(struct ggml_tensor * tensor, bool ask, void * user_data) {
    (void) user_data;
    static const char topk[] = "ffn_moe_topk-";
    const char * name = ggml_get_name(tensor);
    if (strncmp(name, topk, strlen(topk)) != 0) {
        return !ask;
    }
    if (ask) {
        return true;
    }
    // Places in struct ggml_tensor, as in hosts/python/host.py.
    const int64_t * ne = (const int64_t *) ((const char *) tensor + 16);
    const size_t * nb = (const size_t *) ((const char *) tensor + 48);
    for (int64_t token = 0; token < ne[1]; token++) {
        fputs(name + strlen(topk), routes);
        for (int64_t place = 0; place < ne[0]; place++) {
            int32_t expert;
            ggml_backend_tensor_get(tensor, &expert, token * nb[1] + place * nb[0], sizeof(expert));
            fprintf(routes, " %" PRId32, expert);
        }
        fputc('\n', routes);
    }
    return true;
}

// Makes a context of so many tokens.
static struct llama_context * make_context(const char * size) {
    struct params params = llama_context_default_params();
    if (!model || params.words[0] != 512 || params.words[7] != 4 || params.words[8] != 4) {
        fprintf(stderr, "cannot load the model, or another version of llama.cpp\n");
        exit(1);
    }
    // Threads of ggml spin while they wait: several of them are slow on busy cores.
    const char * threads = getenv("HOST_THREADS");
    params.words[0] = size ? (uint32_t) atoi(size) : 256; // n_ctx
    params.words[7] = params.words[8] = threads ? (uint32_t) atoi(threads) : 1; // n_threads, n_threads_batch
    if (routes || getenv("HOST_READ_AT_MATMUL")) {
        bool (*callback)(struct ggml_tensor *, bool, void *) = routes ? write_route : read_at_matmul;
        memcpy(&params.words[22], &callback, sizeof(callback)); // cb_eval
    }
    return llama_init_from_model(model, params);
}

static void load_model(const char * path) {
    struct params of_model = llama_model_default_params();
    const struct llama_model_tensor_buft_override overrides[] = {
        {"ffn_(up|down|gate)_exps", ggml_backend_cpu_buffer_type()}, {NULL, NULL}};
    if (getenv("HOST_EXPERTS_ON_CPU")) {
        const void * first = overrides;
        memcpy(&of_model.words[2], &first, sizeof(first)); // tensor_buft_overrides
        of_model.words[4] = 99;                            // n_gpu_layers
    }
    if (getenv("HOST_PLAIN_BUFFERS")) {
        if (of_model.words[18] != 1 << 16) {
            fprintf(stderr, "use_extra_bufts has another place in this version of llama.cpp\n");
            exit(1);
        }
        of_model.words[18] = 0; // use_extra_bufts, among other flags
    }
    static struct llama_model_kv_override replaced[2];
    const char * override = getenv("HOST_OVERRIDE");
    if (override && sscanf(override, "%127[^=]=%" SCNd64, replaced[0].key, &replaced[0].number) == 2) {
        const void * first = replaced;
        memcpy(&of_model.words[16], &first, sizeof(first)); // kv_overrides
    }
    model = llama_model_load_from_file(path, of_model);
}

static void load(const char * path) {
    load_model(path);
    context = make_context(getenv("HOST_CONTEXT"));
    if (!context) {
        fprintf(stderr, "cannot make a context for %s: too little memory\n", path);
        exit(1);
    }
}

static double now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

static long major_faults(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_majflt;
}

static int by_size(const void * a, const void * b) {
    const double x = *(const double *) a, y = *(const double *) b;
    return (x > y) - (x < y);
}

static void read_text(void) {
    static char bytes[1 << 14];
    FILE * file = fopen(TEXT, "r");
    if (!file) {
        perror("cannot open the fixed text: " TEXT);
        exit(1);
    }
    const size_t len = fread(bytes, 1, sizeof(bytes), file);
    fclose(file);
    n_text = llama_tokenize(llama_model_get_vocab(model), bytes, (int32_t) len, text,
                            sizeof(text) / sizeof(*text), false, false);
}

// FNV-1a of the last logits of a context, by words.
static uint64_t hashed(struct llama_context * of, uint64_t hash) {
    const int32_t size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const float * logits = llama_get_logits_ith(of, -1);
    for (int32_t token = 0; token < size; token++) {
        uint32_t bits;
        memcpy(&bits, &logits[token], sizeof(bits));
        hash = (hash ^ bits) * 0x100000001b3;
    }
    return hash;
}

// Evaluates the next tokens of the text, so many at a time, and writes the answer of `force`.
static void evaluate_text(int32_t count, int32_t at_a_time) {
    static double ms[sizeof(text) / sizeof(*text)];
    if (count < 1 || count > n_text - next) {
        fprintf(stderr, "%d tokens of the text are left\n", n_text - next);
        exit(1);
    }
    const int32_t evaluations = count / at_a_time;
    const long faults = major_faults();
    double sum = 0;
    uint64_t hash = 0xcbf29ce484222325;
    for (int32_t i = 0; i < evaluations; i++) {
        if (routes) {
            fputs("evaluation\n", routes);
        }
        const double began = now_ms();
        const int32_t code = llama_decode(context, llama_batch_get_one(text + next, at_a_time));
        llama_get_logits_ith(context, -1);
        ms[i] = now_ms() - began;
        if (code != 0) {
            fprintf(stderr, "llama_decode failed\n");
            exit(1);
        }
        sum += ms[i];
        next += at_a_time;
        hash = hashed(context, hash);
    }
    const double faults_each = (double) (major_faults() - faults) / evaluations;
    qsort(ms, (size_t) evaluations, sizeof(*ms), by_size);
    if (routes) {
        fflush(routes);
    }
    printf("median_ms %.3f mean_ms %.3f faults %.1f hash %016" PRIx64 "\n", ms[evaluations / 2],
           sum / evaluations, faults_each, hash);
}

// Reads the tokens and writes `count` more, each the most likely one.
static void write_tokens(int32_t * tokens, int32_t n_tokens, int count) {
    const int32_t size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int i = 0; i < count; i++) {
        if (llama_decode(context, llama_batch_get_one(tokens, n_tokens)) != 0) {
            fprintf(stderr, "llama_decode failed\n");
            exit(1);
        }
        const float * logits = llama_get_logits_ith(context, -1);
        last = 0;
        for (int32_t token = 1; token < size; token++) {
            if (logits[token] > logits[last]) {
                last = token;
            }
        }
        printf("%s%d", i ? " " : "", last);
        tokens = &last;
        n_tokens = 1;
    }
    printf("\n");
}

// Forgets everything, reads the prompt and writes `count` tokens.
static void write_text(int count) {
    static const char prompt[] = "The capital of France is";
    int32_t tokens[64];
    const int32_t n_tokens = llama_tokenize(llama_model_get_vocab(model), prompt,
                                            (int32_t) strlen(prompt), tokens, 64, false, false);
    llama_memory_clear(llama_get_memory(context), true);
    write_tokens(tokens, n_tokens, count);
}

static void unload(void) {
    llama_free(context);
    llama_model_free(model);
}

// A thread of `both`: evaluates so many times in a context of its own, and writes the hashes there.
static void * evaluate_apart(void * argument) {
    uint64_t * hashes = argument;
    struct llama_context * own = make_context(NULL);
    for (uint64_t i = hashes[0]; i > 0; i--) {
        int32_t tokens[12];
        memcpy(tokens, text, sizeof(tokens));
        llama_memory_clear(llama_get_memory(own), true);
        if (llama_decode(own, llama_batch_get_one(tokens, 12)) != 0) {
            fprintf(stderr, "llama_decode failed\n");
            exit(1);
        }
        hashes[i] = hashed(own, 0xcbf29ce484222325);
    }
    llama_free(own);
    return NULL;
}

static void both(const char * path, uint64_t count) {
    enum { MOST = 64 };
    uint64_t hashes[2][MOST + 1] = {{count}, {count}};
    pthread_t threads[2];
    if (count < 1 || count > MOST) {
        fprintf(stderr, "1 to %d evaluations\n", MOST);
        exit(1);
    }
    read_text();
    unload();
    load_model(path);
    for (int thread = 0; thread < 2; thread++) {
        pthread_create(&threads[thread], NULL, evaluate_apart, hashes[thread]);
    }
    for (int thread = 0; thread < 2; thread++) {
        pthread_join(threads[thread], NULL);
        for (uint64_t i = count; i > 0; i--) {
            printf(" %016" PRIx64, hashes[thread][i]);
        }
    }
    printf("\n");
    context = make_context(NULL);
}

static void (*handler_before)(int);

static void handle(int signal) {
    if (handler_before != SIG_DFL && handler_before != SIG_IGN) {
        handler_before(signal);
    }
}

static void cycle(const char * path, int count) {
    int32_t token = 1;
    for (int i = 0; i < count; i++) {
        unload();
        load(path);
        if (llama_decode(context, llama_batch_get_one(&token, 1)) != 0) {
            fprintf(stderr, "llama_decode failed\n");
            exit(1);
        }
    }
    puts("cycled");
}

// Writes the numbers of experts that a token uses in each layer: the model's struct has a list of them, with
// zeros for layers that the model lacks.
static void use(const char * numbers) {
    uint32_t layers, used, new;
    uint32_t * words = (uint32_t *) model;
    const size_t count = malloc_usable_size(model) / sizeof(*words);
    if (sscanf(numbers, "%" SCNu32 " %" SCNu32 " %" SCNu32, &layers, &used, &new) == 3) {
        for (size_t at = 1; at + layers < count; at++) {
            uint32_t equal = 0;
            while (equal < layers && words[at + equal] == used) {
                equal++;
            }
            if (equal == layers && words[at - 1] == 0 && words[at + layers] == 0) {
                while (equal-- > 0) {
                    words[at + equal] = new;
                }
                puts("set");
                return;
            }
        }
    }
    puts("not found");
}

// As a program that frees a model and loads another one at the same place, by calls that no hook sees.
static void own_mappings(void) {
    FILE * maps = fopen("/proc/self/maps", "r");
    char line[4352];
    while (maps && fgets(line, sizeof(line), maps)) {
        uintptr_t start, end;
        if (!strstr(line, ".gguf") || sscanf(line, "%" SCNxPTR "-%" SCNxPTR, &start, &end) != 2) {
            continue;
        }
        const size_t bytes = end - start;
        void * copy = malloc(bytes);
        if (!copy) {
            exit(1);
        }
        memcpy(copy, (void *) start, bytes);
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
        if (mmap((void *) start, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) {
            exit(1);
        }
        memcpy((void *) start, copy, bytes);
        free(copy);
    }
    if (maps) {
        fclose(maps);
    }
    puts("owned");
}

static void close_all(const char * path) {
    int closed = 0;
    for (int number = 3; number < 1024; number++) {
        closed += close(number) == 0;
    }
    while (closed-- > 0) {
        open(path, O_RDWR | O_APPEND | O_CREAT, 0600);
    }
    puts("closed");
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: host LIBRARIES MODEL\n");
        return 2;
    }
    llama_log_set(quiet, NULL);
    const char * path = getenv("HOST_ROUTES");
    if (path && !(routes = fopen(path, "w"))) {
        fprintf(stderr, "cannot write %s\n", path);
        return 1;
    }
    ggml_backend_load_all_from_path(argv[1]);
    load(argv[2]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    char line[4096];
    while (fgets(line, sizeof(line), stdin)) {
        line[strcspn(line, "\n")] = 0;
        char * argument = strchr(line, ' ');
        if (argument) {
            *argument++ = 0;
        }
        if (strcmp(line, "text") == 0) {
            write_text(atoi(argument));
        } else if (strcmp(line, "warmup") == 0 && llama_set_warmup) {
            llama_set_warmup(context, true);
            write_text(1);
            llama_set_warmup(context, false);
        } else if (strcmp(line, "more") == 0) {
            int32_t token = last;
            write_tokens(&token, 1, atoi(argument));
        } else if (strcmp(line, "force") == 0 || strcmp(line, "prefill") == 0) {
            const int32_t count = atoi(argument);
            if (!n_text) {
                read_text();
            }
            if (*line == 'p') {
                llama_memory_clear(llama_get_memory(context), true);
                next = 0;
            }
            evaluate_text(count, *line == 'p' ? count : 1);
        } else if (strcmp(line, "reload") == 0) {
            puts(llama_reload_changed_tensors == NULL           ? "no such function"
                 : llama_reload_changed_tensors(context) ? "changed"
                                                                : "unchanged");
        } else if (strcmp(line, "free") == 0) {
            unload();
            puts("freed");
        } else if (strcmp(line, "cycle") == 0) {
            cycle(argv[2], atoi(argument));
        } else if (strcmp(line, "both") == 0) {
            both(argv[2], strtoull(argument, NULL, 10));
        } else if (strcmp(line, "chain") == 0) {
            handler_before = signal(SIGTERM, handle);
            raise(SIGTERM);
            puts("handled");
        } else if (strcmp(line, "use") == 0) {
            use(argument);
        } else if (strcmp(line, "context") == 0) {
            // Beside the first one, to the end of the process.
            puts(make_context(argument) ? "made" : "too little memory");
        } else if (strcmp(line, "own") == 0) {
            own_mappings();
        } else if (strcmp(line, "close") == 0) {
            close_all(argument);
        } else if (strcmp(line, "load") == 0) {
            load(argument);
            puts("loaded");
        } else {
            break;
        }
    }
    return 0;
}
