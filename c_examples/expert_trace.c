// Lists the experts of a model, counts the routed ids of a matrix, and compares the counts with those
// of a plain loop.
//
// usage: expert_trace MODEL.gguf [ends-early]
//
// A program that evaluates a mixture of experts has such a matrix for each layer and batch:
// for each token, the ids of the experts that the router chose.
//
// With LLAMA_EXPERT_TRACE_STATS=1, LLAMA_EXPERT_TRACE_NAMES=1, LLAMA_EXPERT_TRACE_PER_LAYER=1 or
// LLAMA_EXPERT_TRACE_OUTPUT=FILE, the library prints and writes what they state when the trace is
// freed, or at exit.
#include "example.h"

#include <inttypes.h>
#include <string.h>

enum { LAYER = 3, TOKENS = 1000, USED = 2, PADDED = 5, MOST_EXPERTS = 512 };

// Prints the expert tensors of a layer, and returns the number of experts of the layer.
static uint32_t list_experts(const struct llama_model * model, uint32_t layer) {
    static const char * const MATRIX[] = {"gate", "up", "gate and up", "down"};
    uint64_t                  count;
    uint32_t                  experts = 0;
    OK(llama_sidecar_expert_tensor_count(model, &count));
    CHECK(count > 0);
    for (uint64_t i = 0; i < count; i++) {
        struct llama_sidecar_expert_tensor info;
        info.struct_size = sizeof(info);
        OK(llama_sidecar_expert_tensor_get_info(model, i, &info));
        // The name states the same.
        const struct llama_sidecar_tensor_info tensor = tensor_info(model, info.tensor);
        struct llama_sidecar_expert_name       name;
        name.struct_size = sizeof(name);
        OK(llama_sidecar_expert_name_parse(tensor.name, &name));
        CHECK(name.layer == info.layer && name.projection == info.projection);
        CHECK(name.expert == -1 || name.expert == info.first_expert);
        CHECK(tensor.nbytes == info.nbytes && info.nbytes == info.expert_bytes * info.n_experts);
        if (info.layer == layer) {
            printf("%s: %s of experts %" PRIu32 " to %" PRIu32 ", %" PRIu64 " bytes each\n", tensor.name,
                   MATRIX[info.projection], info.first_expert, info.first_expert + info.n_experts - 1,
                   info.expert_bytes);
            experts = info.first_expert + info.n_experts;
        }
    }
    return experts;
}

int main(int argc, char ** argv) {
    CHECK(argc == 2 || argc == 3);
    struct llama_model * model = llama_model_load(argv[1], NULL);
    CHECK(model);
    struct llama_expert_trace * trace = llama_expert_trace_new(model);
    CHECK(trace);
    uint64_t counts[MOST_EXPERTS];
    uint64_t tokens;
    size_t n_experts;
    OK(llama_expert_trace_counts(trace, LAYER, NULL, 0, NULL, &n_experts));
    CHECK(n_experts >= USED && n_experts <= MOST_EXPERTS);
    CHECK(list_experts(model, LAYER) == n_experts);

    // Rows are padded, as in ggml. The padding is not counted.
    static int32_t ids[TOKENS][PADDED];
    uint64_t by_hand[MOST_EXPERTS] = {0};
    memset(ids, 0xff, sizeof(ids));
    for (int token = 0; token < TOKENS; token++) {
        for (int used = 0; used < USED; used++) {
            const int expert = (token * token + 3 * used) % (int) n_experts;
            ids[token][used] = expert;
            by_hand[expert]++;
        }
    }
    OK(llama_expert_trace_record_batch(trace, LAYER, &ids[0][0], USED, TOKENS, sizeof(int32_t),
                                       sizeof(ids[0])));
    OK(llama_expert_trace_counts(trace, LAYER, counts, MOST_EXPERTS, &tokens, NULL));
    CHECK(tokens == TOKENS);
    CHECK(memcmp(counts, by_hand, n_experts * sizeof(counts[0])) == 0);

    static char summary[1 << 16];
    const size_t length = llama_expert_trace_summary(trace, false, summary, sizeof(summary));
    CHECK(length > 0 && length < sizeof(summary));
    printf("%s", summary);
    OK(llama_expert_trace_write(trace, "expert_trace.json"));
    OK(llama_expert_trace_write(trace, "expert_trace.csv"));

    OK(llama_expert_trace_record(trace, 0, 0));
    OK(llama_expert_trace_reset(trace));
    OK(llama_expert_trace_counts(trace, LAYER, counts, 1, &tokens, NULL));
    CHECK(counts[0] == 0 && tokens == 0);

    // Invalid arguments give an error, and nothing is counted.
    CHECK(llama_expert_trace_record(trace, 9999, 0) == LLAMA_SIDECAR_STATUS_NOT_FOUND);
    CHECK(llama_expert_trace_record_batch(trace, LAYER, NULL, 1, 1, 4, 4) ==
          LLAMA_SIDECAR_STATUS_BAD_ARGUMENT);
    CHECK(llama_expert_trace_record_batch(trace, LAYER, &ids[0][0], SIZE_MAX, 2, SIZE_MAX, 4) ==
          LLAMA_SIDECAR_STATUS_BAD_ARGUMENT);
    CHECK(llama_expert_trace_write(trace, "/no/such/folder/trace.json") == LLAMA_SIDECAR_STATUS_IO);
    CHECK(llama_expert_trace_record((const struct llama_expert_trace *) model, 0, 0) ==
          LLAMA_SIDECAR_STATUS_BAD_HANDLE);
    // A trace that the program does not free ends with the process.
    struct llama_expert_trace * not_freed = llama_expert_trace_new(model);
    CHECK(not_freed);
    OK(llama_expert_trace_record(not_freed, LAYER, 1));
    if (argc == 3) {
        _Exit(0); // names are out already; only they are
    }

    OK(llama_expert_trace_record(trace, LAYER, 0));
    OK(llama_expert_trace_free(trace));
    CHECK(llama_expert_trace_reset(trace) == LLAMA_SIDECAR_STATUS_BAD_HANDLE);
    CHECK(llama_expert_trace_summary(NULL, false, NULL, 0) == 0);
    OK(llama_sidecar_model_free(model));
    return 0;
}
