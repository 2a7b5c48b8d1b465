// Changes the quantisation of the experts of a layer on three devices: original type, another type,
// a type with another block size, original type again. Prints the rows on each device at each step.
//
// usage: moe_walk MOE.gguf VARIANT.gguf OTHER_BLOCKS.gguf
//
// Gate and up are split between rows, down within rows, so each device has the same hidden units of
// every expert. A type with larger blocks allows fewer positions to split down; gate and up are
// split at the same positions.

#include "example.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

static const char * const WORK     = "moe_walk_work.gguf";
static const char * const MEMBER[] = {"blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight",
                                      "blk.1.ffn_down_exps.weight"};
enum { GATE, UP, DOWN, MEMBERS };

// Replaces the link at a path: a reload compares the file that the path leads to.
static void point_to(const char * file) {
    remove("moe_walk_work.gguf.new");
    CHECK(symlink(file, "moe_walk_work.gguf.new") == 0);
    CHECK(rename("moe_walk_work.gguf.new", WORK) == 0);
}

static uint64_t find(const struct llama_model * model, const char * name) {
    uint64_t index;
    OK(llama_sidecar_tensor_find(model, name, &index));
    return index;
}

// Prints the split, checks that it is the same for the three tensors, and returns its first
// position.
static uint64_t show(const struct llama_model * model) {
    uint64_t cuts[MEMBERS][8];
    uint32_t parts[MEMBERS];
    for (int m = 0; m < MEMBERS; m++) {
        const uint64_t                         index = find(model, MEMBER[m]);
        const struct llama_sidecar_tensor_info t     = tensor_info(model, index);
        CHECK(t.n_parts > 1 && t.n_parts <= 8 && t.device == -2);
        printf("  %-28s %-5s", t.name, t.type_name);
        uint64_t bytes = 0;
        for (uint32_t p = 0; p < t.n_parts; p++) {
            struct llama_sidecar_tensor_part part;
            part.struct_size = sizeof(part);
            OK(llama_sidecar_tensor_get_part(model, index, p, &part));
            printf("  device %" PRIu32 ": %s %" PRIu64 "..%" PRIu64, part.device,
                   part.axis == LLAMA_SIDECAR_AXIS_ROWS ? "rows" : "columns", part.first,
                   part.first + part.count);
            cuts[m][p] = part.first;
            bytes += part.nbytes;
        }
        printf("\n");
        CHECK(bytes == t.nbytes); // the parts are complete and do not overlap
        parts[m] = t.n_parts;
    }
    for (int m = 1; m < MEMBERS; m++) {
        CHECK(parts[m] == parts[0]);
        CHECK(memcmp(cuts[m], cuts[0], parts[0] * sizeof(cuts[0][0])) == 0);
    }
    return cuts[0][1];
}

// Compares the data on the devices with the file.
static void expect_bytes_of(const struct llama_model * model, const char * path) {
    struct llama_model * fresh = llama_model_load(path, NULL);
    CHECK(fresh != NULL);
    for (int m = 0; m < MEMBERS; m++) {
        const uint64_t                         index  = find(model, MEMBER[m]);
        const struct llama_sidecar_tensor_info ours   = tensor_info(model, index);
        const struct llama_sidecar_tensor_info theirs = tensor_info(fresh, find(fresh, MEMBER[m]));
        CHECK(ours.ggml_type == theirs.ggml_type && ours.nbytes == theirs.nbytes);
        void * bytes = malloc(ours.nbytes);
        CHECK(bytes != NULL);
        OK(llama_sidecar_tensor_read(model, index, 0, bytes, ours.nbytes));
        CHECK(memcmp(bytes, theirs.host_data, ours.nbytes) == 0);
        free(bytes);
    }
    OK(llama_sidecar_model_free(fresh));
}

static struct llama_sidecar_report_info reload(struct llama_context * context) {
    struct llama_sidecar_report * report = NULL;
    OK(llama_sidecar_reload(context, &report));
    struct llama_sidecar_report_info info;
    info.struct_size = sizeof(info);
    OK(llama_sidecar_report_get_info(report, &info));
    CHECK(info.n_commits == 1 && strlen(info.failure) == 0);
    static const char * const OUTCOME[] = {"unchanged", "swapped", "returned",
                                           "in place",  "refused", "moved"};
    for (uint64_t i = 0; i < info.n_tensors; i++) {
        struct llama_sidecar_report_tensor t;
        t.struct_size = sizeof(t);
        OK(llama_sidecar_report_get_tensor(report, i, &t));
        if (strncmp(t.name, "blk.1.ffn_", 10) == 0 &&
            t.outcome != LLAMA_SIDECAR_OUTCOME_UNCHANGED) {
            printf("  %-28s %-8s %s\n", t.name, OUTCOME[t.outcome], t.placement);
        }
    }
    OK(llama_sidecar_report_free(report));
    return info;
}

int main(int argc, char ** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s MOE.gguf VARIANT.gguf OTHER_BLOCKS.gguf\n", argv[0]);
        return 2;
    }
    point_to(argv[1]);
    struct llama_sidecar_params params;
    params.struct_size = sizeof(params);
    OK(llama_sidecar_default_params(&params));
    params.hotswap   = true;
    params.n_devices = 4; // the host and three more
    params.device    = 1;
    params.split     = "3,1,1"; // or LLAMA_SIDECAR_SPLIT=3,1,1
    struct llama_model * model = llama_model_load(WORK, &params);
    CHECK(model != NULL);
    struct llama_context * context = llama_sidecar_context_new(model);
    CHECK(context != NULL);
    for (int m = 0; m < MEMBERS; m++) {
        OK(llama_sidecar_tensor_load(model, find(model, MEMBER[m])));
    }
    printf("original type\n");
    const uint64_t original_cut = show(model);
    expect_bytes_of(model, argv[1]);

    printf("another type\n");
    point_to(argv[2]);
    CHECK(reload(context).n_swapped > 0);
    CHECK(show(model) == original_cut); // the block size is the same
    expect_bytes_of(model, argv[2]);

    printf("a type with another block size\n");
    point_to(argv[3]);
    CHECK(reload(context).n_swapped > 0);
    CHECK(show(model) != original_cut);
    expect_bytes_of(model, argv[3]);

    printf("original type again\n");
    point_to(argv[1]);
    const struct llama_sidecar_report_info back = reload(context);
    CHECK(back.n_returned >= MEMBERS && back.bytes_staged == 0);
    CHECK(show(model) == original_cut);
    expect_bytes_of(model, argv[1]);
    for (int m = 0; m < MEMBERS; m++) {
        CHECK(tensor_info(model, find(model, MEMBER[m])).state ==
              LLAMA_SIDECAR_TENSOR_STATE_ON_ORIGINAL);
    }

    OK(llama_sidecar_context_free(context));
    OK(llama_sidecar_model_free(model));
    CHECK(remove(WORK) == 0);
    return 0;
}
