// Counts the routed ids of a matrix, and compares the counts with those of a plain loop.
//
// usage: expert_trace MODEL.gguf
//
// A program that evaluates a mixture of experts has such a matrix for each layer and batch:
// for each token, the ids of the experts that the router chose.
#include "example.h"

#include <string.h>

enum { LAYER = 3, TOKENS = 1000, USED = 2, PADDED = 5, MOST_EXPERTS = 512 };

int main(int argc, char ** argv) {
    CHECK(argc == 2);
    struct llama_model * model = llama_model_load(argv[1], NULL);
    CHECK(model);
    struct llama_expert_trace * trace = llama_expert_trace_new(model);
    CHECK(trace);
    uint64_t counts[MOST_EXPERTS];
    uint64_t tokens;
    size_t n_experts;
    OK(llama_expert_trace_counts(trace, LAYER, NULL, 0, NULL, &n_experts));
    CHECK(n_experts >= USED && n_experts <= MOST_EXPERTS);

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

    char summary[4096];
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
    OK(llama_expert_trace_free(trace));
    CHECK(llama_expert_trace_reset(trace) == LLAMA_SIDECAR_STATUS_BAD_HANDLE);
    CHECK(llama_expert_trace_summary(NULL, false, NULL, 0) == 0);
    OK(llama_sidecar_model_free(model));
    return 0;
}
