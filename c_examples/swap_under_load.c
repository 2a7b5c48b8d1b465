// Swaps tensors while eight threads evaluate. Each evaluation uses the tensors of one file only,
// and waits no longer than the switch of a few pointers takes.
//
// usage: swap_under_load MODEL.gguf VARIANT.gguf
//
// An "evaluation" of the example adds up bytes of all tensors that differ between the two files.

#include "example.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum { THREADS = 8, SWAPS = 16, MAX_TENSORS = 64, STEP = 61 };

static const char * const WORK = "swap_under_load_work.gguf";

// State of the threads.
static struct llama_model * model;
static uint64_t             tensors[MAX_TENSORS];
static uint64_t             n_tensors;
static uint64_t             expected[2]; // the sums of MODEL and of VARIANT
static atomic_bool          stop;
static atomic_ullong        evaluations;

static void point_to(const char * file) {
    remove("swap_under_load_work.gguf.new");
    CHECK(symlink(file, "swap_under_load_work.gguf.new") == 0);
    CHECK(rename("swap_under_load_work.gguf.new", WORK) == 0);
}

static uint64_t sum_of(const struct llama_model * of) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n_tensors; i++) {
        const struct llama_sidecar_tensor_info t     = tensor_info(of, tensors[i]);
        const uint8_t *                        bytes = t.host_data;
        CHECK(bytes != NULL);
        for (uint64_t b = 0; b < t.nbytes; b += STEP) {
            sum = sum * 31 + bytes[b];
        }
    }
    return sum;
}

static void * evaluate(void * unused) {
    (void) unused;
    struct llama_context * context = llama_sidecar_context_new(model);
    CHECK(context != NULL);
    while (!atomic_load(&stop)) {
        OK(llama_sidecar_eval_begin(context, NULL));
        const uint64_t sum = sum_of(model);
        OK(llama_sidecar_eval_end(context));
        CHECK(sum == expected[0] || sum == expected[1]);
        atomic_fetch_add(&evaluations, 1);
    }
    OK(llama_sidecar_context_free(context));
    return NULL;
}

// Finds the tensors that differ, and their expected sums.
static void compare(const char * a_path, const char * b_path) {
    struct llama_model * a = llama_model_load(a_path, NULL);
    struct llama_model * b = llama_model_load(b_path, NULL);
    CHECK(a != NULL && b != NULL);
    for (uint64_t i = 0; i < model_info(a).n_tensors && n_tensors < MAX_TENSORS; i++) {
        if (tensor_info(a, i).ggml_type != tensor_info(b, i).ggml_type) {
            tensors[n_tensors++] = i;
        }
    }
    CHECK(n_tensors > 0);
    expected[0] = sum_of(a);
    expected[1] = sum_of(b);
    CHECK(expected[0] != expected[1]);
    OK(llama_sidecar_model_free(a));
    OK(llama_sidecar_model_free(b));
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL.gguf VARIANT.gguf\n", argv[0]);
        return 2;
    }
    compare(argv[1], argv[2]);
    point_to(argv[1]);
    struct llama_sidecar_params params;
    params.struct_size = sizeof(params);
    OK(llama_sidecar_default_params(&params));
    params.hotswap = true;
    model          = llama_model_load(WORK, &params);
    CHECK(model != NULL);
    struct llama_context * context = llama_sidecar_context_new(model);
    CHECK(context != NULL);

    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, evaluate, NULL) == 0);
    }
    uint64_t longest_switch_ns = 0;
    for (int i = 1; i <= SWAPS; i++) {
        point_to(argv[1 + i % 2]);
        struct llama_sidecar_report * report = NULL;
        OK(llama_sidecar_reload(context, &report));
        struct llama_sidecar_report_info info;
        info.struct_size = sizeof(info);
        OK(llama_sidecar_report_get_info(report, &info));
        CHECK(info.n_swapped + info.n_returned == n_tensors);
        if (info.switch_ns > longest_switch_ns) {
            longest_switch_ns = info.switch_ns;
        }
        OK(llama_sidecar_report_free(report));
    }
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }

    const struct llama_sidecar_model_info info = model_info(model);
    CHECK(info.generation == SWAPS);
    printf("%d swaps of %" PRIu64 " tensors under %d threads: %llu evaluations, each with the tensors of one file\n",
           SWAPS, n_tensors, THREADS, (unsigned long long) atomic_load(&evaluations));
    printf("longest switch %" PRIu64 " ns; %" PRIu64
           " evaluations waited for one that ran or a switch, at most %" PRIu64 " us\n",
           longest_switch_ns, info.n_pauses, info.longest_pause_us);
    OK(llama_sidecar_context_free(context));
    OK(llama_sidecar_model_free(model));
    CHECK(remove(WORK) == 0);
    return 0;
}
