// Replaces tensors of a loaded model by replacing its file, then restores the original tensors.
// Then takes the tensors from another file, with the model's own file as it is, and restores them.
//
// usage: hot_swap MODEL.gguf VARIANT.gguf
//
// VARIANT is the same model with at least one tensor in another quantisation. The example uses a
// copy of MODEL in the current folder.

#include "example.h"

#include <inttypes.h>
#include <string.h>

static const char * WORK = "hot_swap_work.gguf";

static void copy_file(const char * from, const char * to) {
    FILE * in  = fopen(from, "rb");
    FILE * out = fopen(to, "wb");
    CHECK(in != NULL && out != NULL);
    static char buffer[1 << 20];
    size_t      n;
    while ((n = fread(buffer, 1, sizeof(buffer), in)) > 0) {
        CHECK(fwrite(buffer, 1, n, out) == n);
    }
    CHECK(fclose(in) == 0 && fclose(out) == 0);
}

// Replaces a file in use safely: writes a new file next to it and renames it to the path.
static void replace_file(const char * from) {
    copy_file(from, "hot_swap_work.gguf.new");
    CHECK(rename("hot_swap_work.gguf.new", WORK) == 0);
}

static void graphs_are_stale(uint64_t generation, void * seen) {
    *(uint64_t *) seen = generation;
}

static struct llama_sidecar_report_info reload(struct llama_context * context) {
    struct llama_sidecar_report * report = NULL;
    OK(llama_sidecar_reload(context, &report));
    struct llama_sidecar_report_info info;
    info.struct_size = sizeof(info);
    OK(llama_sidecar_report_get_info(report, &info));
    for (uint64_t i = 0; i < info.n_tensors; i++) {
        struct llama_sidecar_report_tensor t;
        t.struct_size = sizeof(t);
        OK(llama_sidecar_report_get_tensor(report, i, &t));
        if (t.outcome != LLAMA_SIDECAR_OUTCOME_UNCHANGED) {
            printf("  %-32s %s -> %s, %" PRIu64 " bytes\n", t.name, t.old_type, t.new_type, t.nbytes);
        }
    }
    printf("  %" PRIu64 " swapped, %" PRIu64 " returned, %" PRIu64 " unchanged in %" PRIu64
           " us; pause %" PRIu64 " ns\n",
           info.n_swapped, info.n_returned, info.n_unchanged, info.total_us, info.switch_ns);
    OK(llama_sidecar_report_free(report));
    return info;
}

// Compares all tensors with those of a newly opened model.
static void expect_same_tensors(const struct llama_model * model, const char * path) {
    struct llama_model * fresh = llama_model_load(path, NULL);
    CHECK(fresh != NULL);
    const uint64_t count = model_info(model).n_tensors;
    CHECK(model_info(fresh).n_tensors == count);
    for (uint64_t i = 0; i < count; i++) {
        const struct llama_sidecar_tensor_info ours = tensor_info(model, i);
        uint64_t                               index;
        OK(llama_sidecar_tensor_find(fresh, ours.name, &index));
        const struct llama_sidecar_tensor_info theirs = tensor_info(fresh, index);
        CHECK(ours.ggml_type == theirs.ggml_type && ours.nbytes == theirs.nbytes);
        CHECK(memcmp(ours.nb, theirs.nb, sizeof(ours.nb)) == 0);
        CHECK(memcmp(ours.host_data, theirs.host_data, ours.nbytes) == 0);
    }
    OK(llama_sidecar_model_free(fresh));
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL.gguf VARIANT.gguf\n", argv[0]);
        return 2;
    }
    copy_file(argv[1], WORK);

    struct llama_sidecar_params params;
    params.struct_size = sizeof(params);
    OK(llama_sidecar_default_params(&params));
    params.hotswap = true; // or LLAMA_HOTSWAP_ENABLED=1
    struct llama_model * model = llama_model_load(WORK, &params);
    CHECK(model != NULL);
    struct llama_context * context = llama_sidecar_context_new(model);
    CHECK(context != NULL);
    uint64_t stale = 0;
    OK(llama_sidecar_on_stale(context, graphs_are_stale, &stale));

    const uint64_t count   = model_info(model).n_tensors;
    const void **  at_load = malloc(count * sizeof(*at_load));
    CHECK(at_load != NULL);
    for (uint64_t i = 0; i < count; i++) {
        at_load[i] = tensor_info(model, i).host_data;
    }

    printf("nothing changed\n");
    CHECK(!llama_reload_changed_tensors(context));
    CHECK(stale == 0);

    printf("replacing the file by %s\n", argv[2]);
    replace_file(argv[2]);
    const struct llama_sidecar_report_info swapped = reload(context);
    CHECK(swapped.n_swapped > 0 && swapped.n_refused == 0);
    CHECK(stale == 1);
    expect_same_tensors(model, argv[2]);

    // The evaluation uses the new tensors, and no reload can change them before it ends.
    uint64_t generation = 0;
    OK(llama_sidecar_eval_begin(context, &generation));
    CHECK(generation == 1);
    CHECK(llama_sidecar_reload(context, NULL) == LLAMA_SIDECAR_STATUS_BAD_ARGUMENT);
    CHECK(!llama_reload_changed_tensors(context));
    CHECK(llama_sidecar_last_status() == LLAMA_SIDECAR_STATUS_BUSY);
    OK(llama_sidecar_eval_end(context));

    printf("replacing the file by %s again\n", argv[1]);
    replace_file(argv[1]);
    const struct llama_sidecar_report_info returned = reload(context);
    CHECK(returned.n_returned == swapped.n_swapped && returned.n_swapped == 0);
    CHECK(returned.bytes_staged == 0); // zero-copy
    CHECK(stale == 2);
    expect_same_tensors(model, argv[1]);
    for (uint64_t i = 0; i < count; i++) {
        const struct llama_sidecar_tensor_info t = tensor_info(model, i);
        CHECK(t.host_data == at_load[i]);
        CHECK(t.state == LLAMA_SIDECAR_TENSOR_STATE_ON_ORIGINAL);
    }
    printf("taking all tensors from %s, and leaving the file as it is\n", argv[2]);
    OK(llama_sidecar_overlay_set(context, argv[2], NULL, 0, NULL));
    CHECK(stale == 3);
    expect_same_tensors(model, argv[2]);
    CHECK(!llama_reload_changed_tensors(context)); // overlays do not follow the file
    struct llama_sidecar_report * report = NULL;
    OK(llama_sidecar_overlay_revert(context, NULL, 0, &report));
    struct llama_sidecar_report_info reverted;
    reverted.struct_size = sizeof(reverted);
    OK(llama_sidecar_report_get_info(report, &reverted));
    OK(llama_sidecar_report_free(report));
    CHECK(reverted.n_returned == swapped.n_swapped && reverted.bytes_staged == 0);
    expect_same_tensors(model, argv[1]);
    const char * no_tensor = "no.such.tensor";
    CHECK(llama_sidecar_overlay_set(context, argv[2], &no_tensor, 1, NULL) == LLAMA_SIDECAR_STATUS_NOT_FOUND);

    struct llama_sidecar_device_info device;
    device.struct_size = sizeof(device);
    OK(llama_sidecar_device_get_info(model, 0, &device));
    CHECK(device.used == 0 && device.peak > 0);
    printf("all tensors have their original data, and no buffer is left\n");

    free(at_load);
    OK(llama_sidecar_context_free(context));
    OK(llama_sidecar_model_free(model));
    CHECK(remove(WORK) == 0);
    return 0;
}
