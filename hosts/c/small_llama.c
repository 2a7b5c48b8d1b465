#define _DEFAULT_SOURCE
#include "small_llama.h"

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// From ggml's headers, as far as it is used.
enum {
    F32 = 0,
    I32 = 26,
    CPU = 0,
    USAGE_WEIGHTS = 1,
    WIDTH = 64,
    ROWS = 8,
    EXPERTS_USED = 2,
    EXPERTS_IN_ALL = 4
};
struct init_params {
    size_t mem_size;
    void * mem_buffer;
    bool no_alloc;
};
struct gguf_init_params {
    bool no_alloc;
    struct ggml_context ** context;
};
typedef struct ggml_context context_t;
typedef struct ggml_tensor tensor_t;
typedef struct ggml_cgraph graph_t;
typedef struct ggml_backend * backend_t;
typedef struct ggml_backend_buffer * buffer_t;
typedef struct ggml_backend_sched * sched_t;

context_t * ggml_init(struct init_params params);
void ggml_free(context_t * context);
tensor_t * ggml_new_tensor_1d(context_t *, int type, int64_t);
tensor_t * ggml_new_tensor_2d(context_t *, int type, int64_t, int64_t);
tensor_t * ggml_new_tensor_3d(context_t *, int type, int64_t, int64_t, int64_t);
int ggml_backend_view_init(tensor_t *);
tensor_t * ggml_view_2d(context_t *, tensor_t *, int64_t, int64_t, size_t stride, size_t offset);
size_t ggml_row_size(int type, int64_t);
tensor_t * ggml_mul(context_t *, tensor_t *, tensor_t *);
tensor_t * ggml_mul_mat(context_t *, tensor_t *, tensor_t *);
tensor_t * ggml_mul_mat_id(context_t *, tensor_t *, tensor_t *, tensor_t * ids);
void ggml_set_input(tensor_t *);
void ggml_set_output(tensor_t *);
tensor_t * ggml_set_name(tensor_t *, const char *);
tensor_t * ggml_get_tensor(context_t *, const char *);
int64_t ggml_nelements(const tensor_t *);
size_t ggml_nbytes(const tensor_t *);
graph_t * ggml_new_graph_custom(context_t *, size_t, bool);
void ggml_build_forward_expand(graph_t *, tensor_t *);
struct gguf_context * gguf_init_from_file(const char *, struct gguf_init_params);
int64_t gguf_find_tensor(const struct gguf_context *, const char *);
size_t gguf_get_data_offset(const struct gguf_context *);
size_t gguf_get_tensor_offset(const struct gguf_context *, int64_t);
void gguf_free(struct gguf_context *);
backend_t ggml_backend_init_by_type(int, const char *);
void ggml_backend_free(backend_t);
void * ggml_backend_get_device(backend_t);
void * ggml_backend_dev_backend_reg(void *);
void * ggml_backend_reg_get_proc_address(void *, const char *);
buffer_t ggml_backend_alloc_ctx_tensors(context_t *, backend_t);
void ggml_backend_buffer_set_usage(buffer_t, int);
size_t ggml_backend_buffer_get_size(buffer_t);
buffer_t ggml_backend_buft_alloc_buffer(void *, size_t);
buffer_t ggml_backend_cpu_buffer_from_ptr(void *, size_t);
void * ggml_backend_buffer_get_base(buffer_t);
int ggml_backend_tensor_alloc(buffer_t, tensor_t *, void *);
void * ggml_backend_cpu_buffer_type(void);
void ggml_backend_tensor_set(tensor_t *, const void *, size_t, size_t);
void ggml_backend_tensor_get(const tensor_t *, void *, size_t, size_t);
sched_t ggml_backend_sched_new(backend_t *, void *, int, size_t, bool, bool);
void ggml_backend_sched_reset(sched_t);
bool ggml_backend_sched_reserve(sched_t, graph_t *);
bool ggml_backend_sched_alloc_graph(sched_t, graph_t *);
int ggml_backend_sched_graph_compute_async(sched_t, graph_t *);
void ggml_backend_sched_synchronize(sched_t);
void ggml_backend_sched_free(sched_t);
void ggml_backend_sched_set_eval_callback(sched_t, bool (*)(tensor_t *, bool, void *), void *);

enum { PRODUCT, NORM, EXPERTS, ROUTER, WEIGHTS };
static const char * const names[WEIGHTS] = {"w.weight", "norm.weight", "blk.0.ffn_down_exps.weight",
                                            "blk.0.ffn_gate_inp.weight"};
static tensor_t * weights[WEIGHTS];
// A view of the first weight, which is read in its place and kept between evaluations.
static tensor_t * kept_view;
// A copy of the experts, which is read in their place.
static tensor_t * copied_experts;
static backend_t backend;
static sched_t sched;
static buffer_t output;
static context_t * graph_context;
static const size_t graph_size = 1 << 20;
static void * graph_memory;
static graph_t * graph;
static tensor_t *derived;
static tensor_t *input, *ids, *activations, *result;
// Other ids of the same layer, where a variable requests them.
static tensor_t * other_ids;
static bool other_ids_too;
static bool reserves_first;
static bool aborts;

static bool on_abort(void * data) {
    (void) data;
    return aborts;
}

// Copies the experts to a tensor that is not of the model, as a cache of experts does.
static void copy_experts(void) {
    context_t * context = ggml_init((struct init_params){1 << 12, NULL, true});
    copied_experts = ggml_new_tensor_3d(context, F32, WIDTH, WIDTH, EXPERTS_IN_ALL);
    ggml_backend_alloc_ctx_tensors(context, backend);
    const size_t size = ggml_nbytes(copied_experts);
    void * bytes = malloc(size);
    ggml_backend_tensor_get(weights[EXPERTS], bytes, 0, size);
    ggml_backend_tensor_set(copied_experts, bytes, 0, size);
    free(bytes);
}

// Keeps a view of the first weight.
static void keep_view(void) {
    context_t * context = ggml_init((struct init_params){1 << 12, NULL, true});
    kept_view = ggml_view_2d(context, weights[PRODUCT], WIDTH, ROWS, ggml_row_size(F32, WIDTH), 0);
    ggml_backend_view_init(kept_view);
}

void small_load(const char * path, bool reserves) {
    context_t * context = NULL;
    backend = ggml_backend_init_by_type(CPU, NULL);
    const char * later = getenv("SMALL_DESCRIPTOR_OF");
    char by_number[64];
    const int number = later ? open(path, O_RDONLY) : -1;
    if (later) {
        snprintf(by_number, sizeof(by_number), "/proc/self/fd/%d", number);
        path = by_number;
    }
    struct gguf_context * file =
        gguf_init_from_file(path, (struct gguf_init_params){true, &context});
    if (getenv("SMALL_REPLACED_BY")) {
        rename(getenv("SMALL_REPLACED_BY"), path);
    }
    FILE * stream = fopen(path, "rb");
    if (!backend || !file || !stream) {
        fprintf(stderr, "cannot load %s\n", path);
        exit(1);
    }
    for (int i = 0; i < WEIGHTS; i++) {
        weights[i] = ggml_get_tensor(context, names[i]);
    }
    ggml_backend_alloc_ctx_tensors(context, backend);
    for (int i = 0; i < WEIGHTS; i++) {
        if (!weights[i]) {
            continue;
        }
        const size_t size = ggml_nbytes(weights[i]);
        void * bytes = malloc(size);
        const int64_t at = gguf_find_tensor(file, names[i]);
        fseek(stream, (long) (gguf_get_data_offset(file) + gguf_get_tensor_offset(file, at)),
              SEEK_SET);
        if (fread(bytes, 1, size, stream) != size) {
            fprintf(stderr, "cannot read %s\n", names[i]);
            exit(1);
        }
        ggml_backend_tensor_set(weights[i], bytes, 0, size);
        free(bytes);
    }
    fclose(stream);
    gguf_free(file);
    if (later) {
        dup2(open(later, O_RDONLY), number);
    }
    if (weights[EXPERTS] && getenv("SMALL_COPIES_EXPERTS")) {
        copy_experts();
    }
    if (getenv("SMALL_KEEPS_VIEW")) {
        keep_view();
    }
    other_ids_too = getenv("SMALL_ROUTES_TWICE") != NULL;
    sched = ggml_backend_sched_new(&backend, NULL, 1, 64, false, false);
    output = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), 4096);
    void * registration = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    void (*set_abort)(backend_t, bool (*)(void *), void *) = NULL;
    *(void **) &set_abort =
        ggml_backend_reg_get_proc_address(registration, "ggml_backend_set_abort_callback");
    if (set_abort) {
        set_abort(backend, on_abort, NULL);
    }
    reserves_first = reserves;
}

static void * inspect(void * path) {
    gguf_free(gguf_init_from_file(path, (struct gguf_init_params){true, NULL}));
    return NULL;
}

void small_inspect(const char * path, int count) {
    for (int i = 0; i < count; i++) {
        inspect((void *) path);
        pthread_t thread;
        if (pthread_create(&thread, NULL, inspect, (void *) path) == 0) {
            pthread_join(thread, NULL);
        }
    }
}

// A model that is loaded beside others.
struct load {
    const char * path;
    context_t * context;
    struct gguf_context * file;
    tensor_t * weights[WEIGHTS];
    char * bytes;
    size_t size;
    buffer_t buffer;
};
enum { LOADS = 2, WORKERS = 4 };
static struct load loads[LOADS];
static enum placement placement;
static pthread_barrier_t all_open;

static void place(struct load * load, int i) {
    if (!load->weights[i]) {
        return;
    }
    const int64_t at = gguf_find_tensor(load->file, names[i]);
    const size_t offset = gguf_get_data_offset(load->file) + gguf_get_tensor_offset(load->file, at);
    char * in_file = load->bytes + offset;
    if (placement == MAPPED) {
        ggml_backend_tensor_alloc(load->buffer, load->weights[i], in_file);
        return;
    }
    char * to = ggml_backend_buffer_get_base(load->buffer);
    for (int before = 0; before < i; before++) {
        to += load->weights[before] ? ggml_nbytes(load->weights[before]) : 0;
    }
    ggml_backend_tensor_alloc(load->buffer, load->weights[i], to);
    ggml_backend_tensor_set(load->weights[i], in_file, 0, ggml_nbytes(load->weights[i]));
}

static void * place_some(void * first) {
    for (int i = (int) (intptr_t) first; i < LOADS * WEIGHTS; i += WORKERS) {
        place(&loads[i % LOADS], i / LOADS);
    }
    return NULL;
}

// A thread that opens a model, and gives its tensors memory if workers do not.
static void * open_model(void * data) {
    struct load * load = data;
    load->file = gguf_init_from_file(load->path, (struct gguf_init_params){true, &load->context});
    const int descriptor = open(load->path, O_RDONLY);
    load->size = (size_t) lseek(descriptor, 0, SEEK_END);
    load->bytes = mmap(NULL, load->size, PROT_READ, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (!load->file || load->bytes == MAP_FAILED) {
        fprintf(stderr, "cannot load %s\n", load->path);
        exit(1);
    }
    for (int i = 0; i < WEIGHTS; i++) {
        load->weights[i] = ggml_get_tensor(load->context, names[i]);
    }
    load->buffer = placement == MAPPED
                       ? ggml_backend_cpu_buffer_from_ptr(load->bytes, load->size)
                       : ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), load->size);
    ggml_backend_buffer_set_usage(load->buffer, USAGE_WEIGHTS);
    pthread_barrier_wait(&all_open);
    if (placement == BY_OPENER) {
        for (int i = 0; i < WEIGHTS; i++) {
            place(load, i);
        }
    }
    // The workers go on when both are open, and the threads that opened them live.
    pthread_barrier_wait(&all_open);
    return NULL;
}

static void join(pthread_t * threads, int count) {
    for (int i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
    }
}

void small_load_two(const char * first, const char * second, enum placement by) {
    placement = by;
    loads[0] = (struct load){.path = first};
    loads[1] = (struct load){.path = second};
    pthread_t openers[LOADS], workers[WORKERS];
    pthread_barrier_init(&all_open, NULL, LOADS + 1);
    for (int i = 0; i < LOADS; i++) {
        pthread_create(&openers[i], NULL, open_model, &loads[i]);
    }
    pthread_barrier_wait(&all_open);
    if (placement != BY_OPENER) {
        for (int i = 0; i < WORKERS; i++) {
            pthread_create(&workers[i], NULL, place_some, (void *) (intptr_t) i);
        }
        join(workers, WORKERS);
    }
    pthread_barrier_wait(&all_open);
    join(openers, LOADS);
    pthread_barrier_destroy(&all_open);
}

void small_use(int number) {
    memcpy(weights, loads[number - 1].weights, sizeof(weights));
    graph = NULL;
}

void small_watch(bool (*callback)(tensor_t *, bool, void *)) {
    ggml_backend_sched_set_eval_callback(sched, callback, NULL);
}

void small_abort(bool on) { aborts = on; }

void small_derive(const char * name) {
    context_t * context = ggml_init((struct init_params){1 << 12, NULL, true});
    derived = ggml_new_tensor_1d(context, F32, WIDTH);
    ggml_set_name(derived, name);
    ggml_backend_buffer_set_usage(ggml_backend_alloc_ctx_tensors(context, backend), USAGE_WEIGHTS);
    float ones[WIDTH];
    for (int i = 0; i < WIDTH; i++) {
        ones[i] = 1;
    }
    ggml_backend_tensor_set(derived, ones, 0, sizeof(ones));
    graph = NULL;
}

// A matrix product over a view of the weight, whose input may be scaled by a norm, and one
// over routed experts.
static void build(void) {
    if (graph_context) {
        ggml_free(graph_context);
    }
    if (!graph_memory) {
        // Between the weights of a model that the first thread loads and those of models that other threads load: their
        // heaps are below and above this address. The kernel takes another one where it is in use.
        graph_memory = mmap((void *) 0x600000000000, graph_size, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    graph_context = ggml_init((struct init_params){graph_size, graph_memory, true});
    context_t * c = graph_context;
    input = ggml_new_tensor_2d(c, F32, WIDTH, 1);
    ggml_set_name(input, "inp_tokens");
    ggml_set_input(input);
    tensor_t * scaled = weights[NORM] ? ggml_mul(c, input, weights[NORM]) : input;
    scaled = derived ? ggml_mul(c, scaled, derived) : scaled;
    tensor_t * view = ggml_view_2d(c, weights[PRODUCT], WIDTH, ROWS, ggml_row_size(F32, WIDTH), 0);
    result = ggml_mul_mat(c, kept_view ? kept_view : view, scaled);
    ggml_set_output(result);
    graph = ggml_new_graph_custom(c, 64, false);
    ggml_build_forward_expand(graph, result);
    if (weights[EXPERTS]) {
        ids = ggml_new_tensor_2d(c, I32, EXPERTS_USED, 1);
        ggml_set_input(ids);
        activations = ggml_new_tensor_3d(c, F32, WIDTH, 1, 1);
        ggml_set_input(activations);
        tensor_t * read = copied_experts ? copied_experts : weights[EXPERTS];
        tensor_t * experts = ggml_mul_mat_id(c, read, activations, ids);
        ggml_set_output(experts);
        ggml_build_forward_expand(graph, experts);
        if (other_ids_too) {
            other_ids = ggml_new_tensor_2d(c, I32, EXPERTS_USED, 1);
            ggml_set_input(other_ids);
            experts = ggml_mul_mat_id(c, read, activations, other_ids);
            ggml_set_output(experts);
            ggml_build_forward_expand(graph, experts);
        }
    }
    if (weights[ROUTER]) {
        tensor_t * scores = ggml_mul_mat(c, weights[ROUTER], input);
        ggml_set_output(scores);
        ggml_build_forward_expand(graph, scores);
    }
}

static float run(int stall_ms, bool waits, int * status) {
    if (stall_ms) {
        usleep((useconds_t) stall_ms * 1000);
    }
    float ones[WIDTH];
    for (int i = 0; i < WIDTH; i++) {
        ones[i] = 1;
    }
    ggml_backend_tensor_set(input, ones, 0, sizeof(ones));
    if (weights[EXPERTS]) {
        const int32_t routed[EXPERTS_USED] = {0, 1};
        ggml_backend_tensor_set(ids, routed, 0, sizeof(routed));
        ggml_backend_tensor_set(activations, ones, 0, sizeof(ones));
        if (other_ids_too) {
            const int32_t others[EXPERTS_USED] = {1, 3};
            ggml_backend_tensor_set(other_ids, others, 0, sizeof(others));
        }
    }
    *status = ggml_backend_sched_graph_compute_async(sched, graph);
    if (*status != 0 || !waits) {
        return NAN;
    }
    ggml_backend_sched_synchronize(sched);
    float rows[ROWS], sum = 0;
    ggml_backend_tensor_get(result, rows, 0, sizeof(rows));
    for (int i = 0; i < ROWS; i++) {
        sum += rows[i];
    }
    return sum;
}

float llama_decode(int stall_ms, bool waits, int * status) {
    static bool reserved;
    ggml_backend_buffer_get_size(output);
    if (!graph || ggml_nelements(input) != WIDTH) {
        if (!reserved && reserves_first) {
            reserved = true;
            ggml_backend_sched_reset(sched);
            build();
            ggml_backend_sched_reserve(sched, graph);
        }
        ggml_backend_sched_reset(sched);
        build();
        if (!ggml_backend_sched_alloc_graph(sched, graph)) {
            *status = -2;
            return NAN;
        }
    }
    return run(stall_ms, waits, status);
}

void small_free(void) {
    ggml_free(graph_context);
    memset(graph_memory, 0x41, graph_size);
    munmap(graph_memory, graph_size);
    ggml_backend_free(backend);
    ggml_backend_sched_free(sched);
}
