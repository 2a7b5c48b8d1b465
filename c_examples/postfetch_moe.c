// Computes a mixture of experts with post-fetch. Each layer has three phases:
//
//   1. The routed ids are known. Copies of the down-projections of these experts to the GPU start.
//   2. Gate and up are computed on the CPU while the copies are in flight.
//   3. For each expert, llama_postfetch_acquire decides between the device and the CPU.
//
// usage: postfetch_moe MOE.gguf [TOKENS]
//
// The example has no GPU kernels. It copies each expert back from the device, compares it with the
// file byte for byte, and uses it. The result must be bit-identical to that of the data in host
// memory. The example also works without a CUDA driver (the CPU computes everything) and with a
// simulated one, and prints the device. It computes experts of type q4_1 with embeddings of type
// q8_0, as in the fixtures; for a model with others it ends with status 77.
#include "example.h"

#include <math.h>
#include <string.h>

enum { MOST_EXPERTS = 64, MOST_USED = 8, Q4_1 = 3, Q8_0 = 8, F32 = 0, BLOCK = 32, SKIPPED = 77 };

static const char * const GATE = "blk.%d.ffn_gate_exps.weight";
static const char * const UP   = "blk.%d.ffn_up_exps.weight";
static const char * const DOWN = "blk.%d.ffn_down_exps.weight";

static float half(const uint8_t * p) {
    const uint32_t bits = (uint32_t) p[0] | (uint32_t) p[1] << 8;
    const int      exponent = (bits >> 10) & 31;
    const float    fraction = (float) (bits & 1023) / 1024;
    const float    size = exponent == 0 ? ldexpf(fraction, -14) : ldexpf(1 + fraction, exponent - 15);
    return bits & 0x8000 ? -size : size;
}

// Multiplies a row of q4_1 by a vector. A block has a scale, a minimum and 32 numbers of 4 bits.
static float dot(const uint8_t * row, const float * x, uint64_t n) {
    float sum = 0;
    for (uint64_t i = 0; i < n; i += BLOCK, row += 20) {
        const float scale = half(row), least = half(row + 2);
        for (int j = 0; j < 16; j++) {
            sum += (scale * (row[4 + j] & 15) + least) * x[i + j];
            sum += (scale * (row[4 + j] >> 4) + least) * x[i + j + 16];
        }
    }
    return sum;
}

static void multiply(const void * matrix, uint64_t row_bytes, uint64_t rows, const float * x,
                     uint64_t n, float * y) {
    for (uint64_t r = 0; r < rows; r++) {
        y[r] = dot((const uint8_t *) matrix + r * row_bytes, x, n);
    }
}

static struct llama_sidecar_tensor_info find(const struct llama_model * model, const char * format,
                                             int layer, uint32_t type) {
    char     name[64];
    uint64_t index;
    snprintf(name, sizeof(name), format, layer);
    OK(llama_sidecar_tensor_find(model, name, &index));
    const struct llama_sidecar_tensor_info info = tensor_info(model, index);
    CHECK(info.host_data != NULL);
    if (info.ggml_type != type) {
        printf("this example does not compute %s of type %s\n", name, info.type_name);
        exit(SKIPPED);
    }
    return info;
}

// Ends the program for a model with other types than those above.
static void check_types(const struct llama_model * model) {
    char     name[64];
    uint64_t index;
    find(model, "token_embd.weight", 0, Q8_0);
    for (int layer = 0;; layer++) {
        snprintf(name, sizeof(name), DOWN, layer);
        if (llama_sidecar_tensor_find(model, name, &index) != LLAMA_SIDECAR_STATUS_OK) {
            break;
        }
        find(model, GATE, layer, Q4_1);
        find(model, UP, layer, Q4_1);
        find(model, DOWN, layer, Q4_1);
    }
}

// Finds the experts with the largest scores.
static void route(const float * router, const float * x, uint64_t n, int n_experts, int n_used,
                  int32_t * ids) {
    float scores[MOST_EXPERTS];
    for (int e = 0; e < n_experts; e++) {
        scores[e] = 0;
        for (uint64_t i = 0; i < n; i++) {
            scores[e] += router[(uint64_t) e * n + i] * x[i];
        }
    }
    for (int k = 0; k < n_used; k++) {
        int best = 0;
        for (int e = 1; e < n_experts; e++) {
            best = scores[e] > scores[best] ? e : best;
        }
        ids[k]       = best;
        scores[best] = -INFINITY;
    }
}

// Loads a whole model to CUDA devices. Without a CUDA device, opening the model fails.
static void on_the_device(const char * path) {
    struct llama_sidecar_params params;
    params.struct_size = sizeof(params);
    OK(llama_sidecar_default_params(&params));
    params.use_cuda            = true;
    params.device              = 1;
    struct llama_model * model = llama_model_load(path, &params);
    if (model == NULL) {
        printf("no model on a CUDA device: %s\n", llama_sidecar_last_error());
        return;
    }
    struct llama_sidecar_device_info device;
    device.struct_size = sizeof(device);
    OK(llama_sidecar_device_get_info(model, 1, &device));
    CHECK(device.kind == LLAMA_SIDECAR_DEVICE_KIND_CUDA);
    const struct llama_sidecar_tensor_info before = find(model, GATE, 0, Q4_1);
    if (llama_sidecar_tensor_load(model, before.index) != LLAMA_SIDECAR_STATUS_OK) {
        CHECK(llama_sidecar_last_status() == LLAMA_SIDECAR_STATUS_OUT_OF_MEMORY);
    } else {
        void * bytes = malloc(before.nbytes);
        CHECK(bytes != NULL && tensor_info(model, before.index).device == 1);
        OK(llama_sidecar_tensor_read(model, before.index, 0, bytes, before.nbytes));
        CHECK(memcmp(bytes, before.host_data, before.nbytes) == 0);
        free(bytes);
        printf("a tensor of the model was copied to %s and back without a difference\n", device.name);
    }
    OK(llama_sidecar_model_free(model));
}

// Uses two experts twice, with a cache on the device that has them from the beginning.
static void use_twice(const struct llama_model * model) {
    struct llama_postfetch_params params;
    params.struct_size = sizeof(params);
    OK(llama_postfetch_default_params(&params));
    params.block_on_miss               = true;
    params.cache_bytes                 = UINT64_MAX;
    struct llama_postfetch * postfetch = llama_postfetch_init(model, &params);
    CHECK(postfetch != NULL);
    // In practice, the trace is from an earlier run.
    struct llama_expert_trace * trace    = llama_expert_trace_new(model);
    uint64_t                    n_filled = 0;
    CHECK(trace != NULL);
    OK(llama_expert_trace_record(trace, 0, 1));
    OK(llama_expert_trace_record(trace, 0, 2));
    OK(llama_expert_trace_write(trace, "postfetch_trace.json"));
    OK(llama_postfetch_fill_cache(postfetch, "postfetch_trace.json", &n_filled));
    OK(llama_expert_trace_free(trace));
    CHECK(llama_postfetch_fill_cache(postfetch, "/no/such/trace.json", NULL) ==
          LLAMA_SIDECAR_STATUS_NOT_FOUND);
    CHECK(llama_postfetch_fill_cache(postfetch, NULL, NULL) == LLAMA_SIDECAR_STATUS_BAD_ARGUMENT);
    CHECK(llama_postfetch_fill_cache((const struct llama_postfetch *) (const void *) model,
                                     "postfetch_trace.json", NULL) == LLAMA_SIDECAR_STATUS_BAD_HANDLE);
    struct llama_postfetch_stats stats;
    stats.struct_size = sizeof(stats);
    OK(llama_postfetch_get_stats(postfetch, &stats));
    const uint64_t bytes     = stats.bytes;
    uint64_t       on_device = 0;
    for (int use = 0; use < 2; use++) {
        const int32_t ids[] = {1, 2};
        OK(llama_postfetch_schedule(postfetch, 0, ids, 2));
        for (int k = 0; k < 2; k++) {
            struct llama_postfetch_answer answer;
            answer.struct_size = sizeof(answer);
            OK(llama_postfetch_query(postfetch, 0, (uint32_t) ids[k], &answer));
            CHECK(n_filled < 2 || answer.state == LLAMA_POSTFETCH_STATE_GPU_READY);
            OK(llama_postfetch_acquire(postfetch, 0, (uint32_t) ids[k], &answer));
            if (answer.device_data != 0) {
                void * data = malloc(answer.nbytes);
                CHECK(data != NULL);
                CHECK(llama_postfetch_download(postfetch, 0, (uint32_t) ids[k], data, answer.nbytes) !=
                          LLAMA_SIDECAR_STATUS_OK ||
                      memcmp(data, answer.host_data, answer.nbytes) == 0);
                free(data);
                on_device++;
            }
        }
        OK(llama_postfetch_release_layer(postfetch, 0));
    }
    OK(llama_postfetch_get_stats(postfetch, &stats));
    CHECK(stats.n_hits == on_device && stats.n_cache_evictions == 0);
    // After a failed call, the CPU computed an expert, or its copy began again.
    CHECK(stats.n_errors > 0 ||
          (stats.cache_bytes == 0
               ? n_filled == 0 && stats.n_cache_hits == 0
               : n_filled == 2 && stats.n_cache_hits == 4 && on_device == 4 && stats.bytes == bytes));
    printf("cache of %llu bytes: %llu of 4 uses found their expert there\n\n",
           (unsigned long long) stats.cache_bytes, (unsigned long long) stats.n_cache_hits);
    OK(llama_postfetch_free(postfetch));
}

int main(int argc, char ** argv) {
    CHECK(argc == 2 || argc == 3);
    const int            n_tokens = argc == 3 ? atoi(argv[2]) : 2;
    struct llama_model * model    = llama_model_load(argv[1], NULL);
    CHECK(model != NULL);
    check_types(model);
    use_twice(model);
    struct llama_postfetch * postfetch = llama_postfetch_init(model, NULL);
    CHECK(postfetch != NULL);

    static char text[4096];
    CHECK(llama_postfetch_describe(postfetch, false, text, sizeof(text)) > 0);
    printf("%.*s\n\n", (int) strcspn(text, "\n"), text);

    const struct llama_sidecar_tensor_info embedding = find(model, "token_embd.weight", 0, Q8_0);
    const uint64_t                         n         = embedding.ne[0];
    const uint64_t hidden = find(model, GATE, 0, Q4_1).ne[1];
    const int      n_experts = (int) find(model, GATE, 0, Q4_1).ne[2];
    const int      n_used    = 2;
    CHECK(n_experts <= MOST_EXPERTS && n_used <= MOST_USED);
    float * x = calloc(4 * n + 2 * hidden, sizeof(float));
    CHECK(x != NULL);
    float * normal = x + n, *from_device = x + 2 * n, *from_host = x + 3 * n, *gate = x + 4 * n,
          *up = gate + hidden;
    float h[MOST_USED][8192];
    CHECK(hidden <= 8192);

    uint64_t on_device = 0, on_cpu = 0;
    for (int token = 0; token < n_tokens; token++) {
        const uint8_t * row = (const uint8_t *) embedding.host_data + (uint64_t) (1000 + token) * embedding.nb[1];
        for (uint64_t i = 0; i < n; i++) {
            const uint8_t * block = row + i / BLOCK * 34;
            x[i] = half(block) * (int8_t) block[2 + i % BLOCK];
        }
        for (int layer = 0;; layer++) {
            char     name[64];
            uint64_t down;
            uint32_t its_layer;
            snprintf(name, sizeof(name), DOWN, layer);
            if (llama_sidecar_tensor_find(model, name, &down) != LLAMA_SIDECAR_STATUS_OK) {
                break;
            }
            // Only base weights have a layer; tensors of adapters have none.
            OK(llama_postfetch_layer_of(postfetch, down, &its_layer));
            CHECK(its_layer == (uint32_t) layer);
            const struct llama_sidecar_tensor_info g = find(model, GATE, layer, Q4_1);
            const struct llama_sidecar_tensor_info u = find(model, UP, layer, Q4_1);
            const struct llama_sidecar_tensor_info r = find(model, "blk.%d.ffn_gate_inp.weight", layer, F32);
            float squares = 1e-6f;
            for (uint64_t i = 0; i < n; i++) {
                squares += x[i] * x[i];
            }
            for (uint64_t i = 0; i < n; i++) {
                normal[i] = x[i] / sqrtf(squares / (float) n);
            }

            // 1. The routed ids are known.
            int32_t ids[MOST_USED];
            route(r.host_data, normal, n, n_experts, n_used, ids);
            OK(llama_postfetch_schedule(postfetch, its_layer, ids, (size_t) n_used));

            // 2. Gate and up on the CPU.
            for (int k = 0; k < n_used; k++) {
                const uint64_t expert = (uint64_t) ids[k];
                multiply((const char *) g.host_data + expert * g.nb[2], g.nb[1], hidden, normal, n, gate);
                multiply((const char *) u.host_data + expert * u.nb[2], u.nb[1], hidden, normal, n, up);
                for (uint64_t i = 0; i < hidden; i++) {
                    h[k][i] = gate[i] / (1 + expf(-gate[i])) * up[i];
                }
            }

            // 3. Down on the device or on the CPU.
            for (int k = 0; k < n_used; k++) {
                struct llama_postfetch_answer answer;
                answer.struct_size = sizeof(answer);
                OK(llama_postfetch_acquire(postfetch, its_layer, (uint32_t) ids[k], &answer));
                CHECK(answer.ne[0] == hidden && answer.ne[1] == n && answer.host_data != NULL);
                CHECK(answer.ggml_type == Q4_1);
                CHECK((answer.device_data != 0) == (answer.reason == LLAMA_POSTFETCH_REASON_NONE));
                multiply(answer.host_data, answer.row_bytes, n, h[k], hidden, from_host);
                if (answer.device_data != 0) {
                    void * bytes = malloc(answer.nbytes);
                    CHECK(bytes != NULL);
                    // Only this example reads it back: a program with kernels does not.
                    if (llama_postfetch_download(postfetch, its_layer, (uint32_t) ids[k], bytes,
                                                 answer.nbytes) == LLAMA_SIDECAR_STATUS_OK) {
                        CHECK(memcmp(bytes, answer.host_data, answer.nbytes) == 0);
                        multiply(bytes, answer.row_bytes, n, h[k], hidden, from_device);
                        CHECK(memcmp(from_device, from_host, n * sizeof(float)) == 0);
                    }
                    free(bytes);
                    on_device++;
                } else {
                    on_cpu++;
                }
                for (uint64_t i = 0; i < n; i++) {
                    x[i] += from_host[i] / (float) n_used;
                }
            }
            OK(llama_postfetch_release_layer(postfetch, its_layer));
        }
    }
    CHECK(isfinite(x[0]) && on_device + on_cpu > 0);

    struct llama_postfetch_stats stats;
    stats.struct_size = sizeof(stats);
    OK(llama_postfetch_get_stats(postfetch, &stats));
    CHECK(stats.n_hits == on_device);
    CHECK(llama_postfetch_describe(postfetch, false, text, sizeof(text)) < sizeof(text));
    printf("%s\n", text);
    CHECK(llama_postfetch_describe(postfetch, true, text, sizeof(text)) < sizeof(text));
    printf("%s\n", text);

    // Invalid arguments give an error, or the answer to use the CPU.
    struct llama_postfetch_answer answer;
    answer.struct_size = sizeof(answer);
    OK(llama_postfetch_acquire(postfetch, 9999, 0, &answer));
    CHECK(answer.reason == LLAMA_POSTFETCH_REASON_FOREIGN && answer.host_data == NULL);
    OK(llama_postfetch_query(postfetch, 0, 0, &answer));
    CHECK(answer.state == LLAMA_POSTFETCH_STATE_CPU_ONLY && answer.host_data != NULL);
    CHECK(llama_postfetch_schedule(postfetch, 0, NULL, 1) == LLAMA_SIDECAR_STATUS_BAD_ARGUMENT);
    CHECK(llama_postfetch_download(postfetch, 0, 0, text, 7) == LLAMA_SIDECAR_STATUS_NOT_FOUND);
    CHECK(llama_postfetch_init(NULL, NULL) == NULL);
    CHECK(llama_postfetch_release((const struct llama_postfetch *) (const void *) model, 0, 0) ==
          LLAMA_SIDECAR_STATUS_BAD_HANDLE);
    struct llama_postfetch_params params;
    params.struct_size = sizeof(params);
    OK(llama_postfetch_default_params(&params));
    params.max_transfers = 0;
    CHECK(llama_postfetch_init(model, &params) == NULL);
    CHECK(llama_sidecar_last_status() == LLAMA_SIDECAR_STATUS_BAD_ARGUMENT);

    OK(llama_sidecar_model_free(model)); // the scheduler keeps the model alive
    OK(llama_postfetch_schedule(postfetch, 0, (const int32_t[]) {1, 2}, 2));
    OK(llama_postfetch_free(postfetch)); // waits for copies in flight
    CHECK(llama_postfetch_free(postfetch) == LLAMA_SIDECAR_STATUS_BAD_HANDLE);
    CHECK(llama_postfetch_compute_stream(postfetch) == NULL);
    free(x);
    on_the_device(argv[1]);
    printf("%llu experts came from the device, %llu were for the CPU; every byte was right\n",
           (unsigned long long) on_device, (unsigned long long) on_cpu);
    return 0;
}
