// Reads the routed experts of each layer from disk before they are used, and compares the bytes in
// the mapping with those of the file.
//
// usage: expert_stream MOE.gguf [VARIANT.gguf]
//
// A program that evaluates a mixture of experts schedules a layer as soon as its router has chosen.
// The experts are then on their way from the disk while the program computes. VARIANT is the same
// model with other experts in layer 1: after a reload these are no longer read from the file.
#include "example.h"

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

enum { LAYERS = 512, MATRICES = 3, USED = 2, TOKENS = 1, PADDED = 5 };

static const char * const WORK             = "expert_stream_work.gguf";
static const char * const MATRIX[MATRICES] = {"gate", "up", "down"};

// Replaces the link at a path: a reload compares the file that the path leads to.
static void point_to(const char * file) {
    remove("expert_stream_work.gguf.new");
    CHECK(symlink(file, "expert_stream_work.gguf.new") == 0);
    CHECK(rename("expert_stream_work.gguf.new", WORK) == 0);
}

// Finds a merged expert tensor, and fills its description.
static bool find(const struct llama_model * model, int layer, int matrix,
                 struct llama_sidecar_tensor_info * info) {
    char     name[64];
    uint64_t index;
    snprintf(name, sizeof(name), "blk.%d.ffn_%s_exps.weight", layer, MATRIX[matrix]);
    if (llama_sidecar_tensor_find(model, name, &index) != LLAMA_SIDECAR_STATUS_OK) {
        return false;
    }
    *info = tensor_info(model, index);
    return true;
}

// Compares an expert in the mapping with the same bytes of the file.
static void expect_bytes_of(const char * path, const struct llama_sidecar_tensor_info * tensor,
                            int expert) {
    const uint64_t nbytes = tensor->nb[2];
    const uint64_t at     = (uint64_t) expert * nbytes;
    const int      file   = open(path, O_RDONLY);
    char *         bytes  = malloc(nbytes);
    CHECK(file >= 0 && bytes != NULL && tensor->host_data != NULL);
    CHECK(pread(file, bytes, nbytes, (off_t) (tensor->file_offset + at)) == (ssize_t) nbytes);
    CHECK(memcmp(bytes, (const char *) tensor->host_data + at, nbytes) == 0);
    free(bytes);
    CHECK(close(file) == 0);
}

static struct llama_expert_stream_stats stats_of(const struct llama_expert_stream * stream) {
    struct llama_expert_stream_stats stats;
    stats.struct_size = sizeof(stats);
    OK(llama_expert_stream_get_stats(stream, &stats));
    return stats;
}

// One evaluation: schedules each layer, then uses its experts. Returns the bytes of the experts that
// were used in place.
static uint64_t evaluate(const char * path, const struct llama_model * model,
                         const struct llama_expert_stream * stream) {
    uint64_t used_bytes = 0;
    for (int layer = 0; layer < LAYERS; layer++) {
        struct llama_sidecar_tensor_info tensor;
        if (!find(model, layer, 0, &tensor)) {
            continue;
        }
        // The output of the router. Rows are padded, as in ggml.
        const int experts              = (int) tensor.ne[2];
        int32_t   ids[TOKENS][PADDED];
        memset(ids, 0xff, sizeof(ids));
        ids[0][0] = layer % experts;
        ids[0][1] = (layer + experts / 2) % experts;
        OK(llama_expert_stream_schedule(stream, (uint32_t) layer, &ids[0][0], USED, TOKENS,
                                        sizeof(ids[0][0]), sizeof(ids[0])));
        for (int matrix = 0; matrix < MATRICES; matrix++) {
            CHECK(find(model, layer, matrix, &tensor));
            if (tensor.state != LLAMA_SIDECAR_TENSOR_STATE_ON_ORIGINAL) {
                continue; // in a buffer of its own
            }
            for (int used = 0; used < USED; used++) {
                expect_bytes_of(path, &tensor, ids[0][used]);
                used_bytes += tensor.nb[2];
            }
        }
    }
    return used_bytes;
}

// Checks that the call fails with this status, and that the message contains these words.
static void fails(enum llama_sidecar_status found, enum llama_sidecar_status expected,
                  const char * words) {
    CHECK(found == expected && llama_sidecar_last_status() == expected);
    CHECK(strstr(llama_sidecar_last_error(), words) != NULL);
    printf("%-14s %s\n", llama_sidecar_status_name(expected), llama_sidecar_last_error());
}

// Invalid calls give an error, and nothing is scheduled.
static void errors(const char * path, const struct llama_model * model,
                   struct llama_expert_stream * stream) {
    const int32_t                          id     = 0;
    const struct llama_expert_stream_stats before = stats_of(stream);
    fails(llama_expert_stream_schedule(stream, 9999, &id, 1, 1, 4, 4),
          LLAMA_SIDECAR_STATUS_NOT_FOUND, "layer 9999");
    fails(llama_expert_stream_schedule(stream, 0, NULL, 1, 1, 4, 4),
          LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "ids is NULL");
    fails(llama_expert_stream_schedule(stream, 0, &id, 2, 1, 0, 4),
          LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "used_stride");
    fails(llama_expert_stream_schedule(stream, 0, &id, 1, SIZE_MAX, 4, 4),
          LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "larger than memory");
    fails(llama_expert_stream_schedule((const struct llama_expert_stream *) model, 0, &id, 1, 1, 4,
                                       4),
          LLAMA_SIDECAR_STATUS_BAD_HANDLE, "another kind");
    fails(llama_expert_stream_get_stats(stream, NULL), LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "NULL");
    OK(llama_expert_stream_schedule(stream, 0, NULL, 0, 0, 0, 0));
    // Ids that are not experts are ignored.
    const int32_t others[] = {-1, INT32_MAX, INT32_MIN};
    OK(llama_expert_stream_schedule(stream, 0, others, 3, 1, 4, 12));
    OK(llama_expert_stream_finish(stream));
    CHECK(stats_of(stream).checked_bytes == before.checked_bytes);

    // Without a mapping, and after all tensors were loaded, no expert is used in place.
    struct llama_sidecar_params params;
    params.struct_size = sizeof(params);
    OK(llama_sidecar_default_params(&params));
    for (int mapped = 0; mapped < 2; mapped++) {
        params.use_mmap           = mapped == 1;
        struct llama_model * copy = llama_model_load(path, &params);
        CHECK(copy != NULL);
        if (mapped) {
            OK(llama_sidecar_model_load_all(copy, NULL, NULL, NULL));
        }
        CHECK(llama_expert_stream_new(copy, NULL) == NULL);
        fails(llama_sidecar_last_status(), LLAMA_SIDECAR_STATUS_DISABLED, "use_mmap");
        OK(llama_sidecar_model_free(copy));
    }
}

int main(int argc, char ** argv) {
    if (argc != 2 && argc != 3) {
        fprintf(stderr, "usage: %s MOE.gguf [VARIANT.gguf]\n", argv[0]);
        return 2;
    }
    point_to(argv[1]);
    struct llama_sidecar_params params;
    params.struct_size = sizeof(params);
    OK(llama_sidecar_default_params(&params));
    params.hotswap             = true;
    struct llama_model * model = llama_model_load(WORK, &params);
    CHECK(model != NULL);

    struct llama_expert_stream_params settings;
    settings.struct_size = sizeof(settings);
    OK(llama_expert_stream_default_params(&settings));
    settings.always                     = true; // or LLAMA_EXPERT_STREAM=on
    struct llama_expert_stream * stream = llama_expert_stream_new(model, &settings);
    CHECK(stream != NULL);

    const uint64_t used_bytes = evaluate(argv[1], model, stream);
    OK(llama_expert_stream_finish(stream));
    const struct llama_expert_stream_stats first = stats_of(stream);
    printf("%" PRIu64 " layers: %" PRIu64 " bytes of experts, %" PRIu64 " of them in memory, %" PRIu64
           " read ahead\n",
           first.n_layers, first.checked_bytes, first.resident_bytes, first.read_bytes);
    // Whole pages are read.
    CHECK(used_bytes > 0 && first.checked_bytes >= used_bytes);
    CHECK(first.n_failed == 0 && !first.resting && !first.stopped);

    errors(argv[1], model, stream);

    if (argc == 3) {
        struct llama_context * context = llama_sidecar_context_new(model);
        CHECK(context != NULL);
        point_to(argv[2]);
        CHECK(llama_reload_changed_tensors(context));
        const uint64_t bytes_in_place = evaluate(argv[1], model, stream);
        OK(llama_expert_stream_finish(stream));
        const struct llama_expert_stream_stats second = stats_of(stream);
        printf("after a reload: %" PRIu64 " bytes of experts\n",
               second.checked_bytes - first.checked_bytes);
        CHECK(bytes_in_place < used_bytes);
        CHECK(second.checked_bytes - first.checked_bytes < first.checked_bytes);
        OK(llama_sidecar_context_free(context));
    }

    // The stream keeps the model alive.
    OK(llama_sidecar_model_free(model));
    const int32_t id = 0;
    OK(llama_expert_stream_schedule(stream, 0, &id, 1, 1, sizeof(id), sizeof(id)));
    OK(llama_expert_stream_free(stream));
    fails(llama_expert_stream_finish(stream), LLAMA_SIDECAR_STATUS_BAD_HANDLE, "was freed");
    CHECK(remove(WORK) == 0);
    return 0;
}
