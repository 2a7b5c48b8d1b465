// A program built with the header of 0.1, which uses every struct of it. It has to run with each
// later library of the same SONAME.
//
//   program_0_1 present|grown MODEL.gguf VARIANT.gguf MOE.gguf
//
// "present" runs it with a library as it is released. "grown" runs it with one in which every struct
// has one more field, whose value is GROWN: a program that gives more room must find it, and a program
// of 0.1 must not.

#include "llama_sidecar-0.1.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROOM = 1024, FREE = 0xee };

static const uint64_t     GROWN = 0x5ac3a53c96f00f69;
static const char * const WORK  = "program_0_1_work.gguf";

static bool with_grown_library;

#define CHECK(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "%s:%d: not true: %s\n  last error: %s\n", __FILE__, __LINE__,        \
                    #condition, llama_sidecar_last_error());                                      \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

#define OK(call) CHECK((call) == LLAMA_SIDECAR_STATUS_OK)

// A struct of 0.1, and memory behind it that the library must not touch.
#define WITH_ROOM(type)                                                                           \
    union {                                                                                       \
        struct type   known;                                                                      \
        unsigned char bytes[ROOM];                                                                \
    }

static void set_size(unsigned char * bytes, size_t size) {
    memset(bytes, FREE, ROOM);
    memcpy(bytes, &size, sizeof(size));
}

static bool is_free(const unsigned char * bytes, size_t from) {
    for (size_t i = from; i < ROOM; i++) {
        if (bytes[i] != FREE) {
            return false;
        }
    }
    return true;
}

static bool has_grown(const unsigned char * bytes, size_t from) {
    for (size_t i = from; i + sizeof(GROWN) <= ROOM; i++) {
        if (memcmp(bytes + i, &GROWN, sizeof(GROWN)) == 0) {
            return true;
        }
    }
    return false;
}

// `call` fills `s`: not with a size below that of 0.1; with more room, what the library has; and
// with the size of 0.1, exactly that much.
#define FILLS(s, call)                                                                            \
    do {                                                                                          \
        const size_t size = sizeof((s).known);                                                    \
        set_size((s).bytes, size - 1);                                                            \
        CHECK((call) == LLAMA_SIDECAR_STATUS_BAD_ARGUMENT);                                       \
        CHECK(strstr(llama_sidecar_last_error(), "struct_size") != NULL);                         \
        CHECK(is_free((s).bytes, sizeof(size_t)));                                                \
        set_size((s).bytes, ROOM);                                                                \
        OK(call);                                                                                 \
        CHECK(!with_grown_library || has_grown((s).bytes, size));                                 \
        set_size((s).bytes, size);                                                                \
        OK(call);                                                                                 \
        CHECK(is_free((s).bytes, size));                                                          \
        CHECK((s).known.struct_size == size);                                                     \
    } while (0)

static void point_to(const char * file) {
    remove("program_0_1_work.gguf.new");
    CHECK(symlink(file, "program_0_1_work.gguf.new") == 0);
    CHECK(rename("program_0_1_work.gguf.new", WORK) == 0);
}

static struct llama_model * load(void) {
    WITH_ROOM(llama_sidecar_params) params;
    FILLS(params, llama_sidecar_default_params(&params.known));
    CHECK(params.known.use_mmap && params.known.n_devices == 1);
    params.known.hotswap   = true;
    params.known.n_devices = 2;
    params.known.device    = 1;
    params.known.struct_size -= 1;
    CHECK(llama_model_load(WORK, &params.known) == NULL);
    CHECK(llama_sidecar_last_status() == LLAMA_SIDECAR_STATUS_BAD_ARGUMENT);
    params.known.struct_size += 1;
    struct llama_model * model = llama_model_load(WORK, &params.known);
    CHECK(model != NULL);
    return model;
}

static void look_at(const struct llama_model * model) {
    WITH_ROOM(llama_sidecar_model_info) info;
    FILLS(info, llama_sidecar_model_get_info(model, &info.known));
    CHECK(info.known.n_tensors > 0 && info.known.n_files == 1 && info.known.n_devices == 2);
    CHECK(info.known.generation == 0 && info.known.gguf_version == 3);

    uint64_t index;
    WITH_ROOM(llama_sidecar_metadata_info) key;
    OK(llama_sidecar_metadata_find(model, "general.architecture", &index));
    FILLS(key, llama_sidecar_metadata_get_info(model, index, &key.known));
    CHECK(strcmp(key.known.key, "general.architecture") == 0);
    CHECK(key.known.count == 1 && key.known.gguf_type == 8 && !key.known.is_array);

    WITH_ROOM(llama_sidecar_device_info) device;
    FILLS(device, llama_sidecar_device_get_info(model, 1, &device.known));
    CHECK(strcmp(device.known.name, "host1") == 0);
    CHECK(device.known.kind == LLAMA_SIDECAR_DEVICE_KIND_HOST && device.known.allocations == 0);

    WITH_ROOM(llama_sidecar_load_report) report;
    FILLS(report, llama_sidecar_model_load_all(model, NULL, NULL, &report.known));
    CHECK(report.known.n_tensors == 0); // the call before loaded them
    OK(llama_sidecar_device_get_info(model, 1, &device.known));
    CHECK(device.known.allocations > 0 && device.known.used > 0);

    WITH_ROOM(llama_sidecar_tensor_info) tensor;
    OK(llama_sidecar_tensor_find(model, "token_embd.weight", &index));
    FILLS(tensor, llama_sidecar_tensor_get_info(model, index, &tensor.known));
    CHECK(strcmp(tensor.known.name, "token_embd.weight") == 0);
    CHECK(tensor.known.index == index && tensor.known.host_data != NULL);
    CHECK(tensor.known.device == 1 && tensor.known.n_parts == 1);
    CHECK(tensor.known.state == LLAMA_SIDECAR_TENSOR_STATE_ON_ORIGINAL);

    WITH_ROOM(llama_sidecar_tensor_part) part;
    FILLS(part, llama_sidecar_tensor_get_part(model, index, 0, &part.known));
    CHECK(part.known.nbytes == tensor.known.nbytes && part.known.device == 1);
    CHECK(part.known.axis == LLAMA_SIDECAR_AXIS_NONE);
}

static void swap(struct llama_model * model, const char * variant) {
    struct llama_context * context = llama_sidecar_context_new(model);
    CHECK(context != NULL);
    point_to(variant);
    struct llama_sidecar_report * report = NULL;
    OK(llama_sidecar_reload(context, &report));

    WITH_ROOM(llama_sidecar_report_info) info;
    FILLS(info, llama_sidecar_report_get_info(report, &info.known));
    CHECK(info.known.n_files == 1 && info.known.n_swapped > 0 && info.known.n_refused == 0);
    CHECK(info.known.generation == 1 && info.known.total_us > 0);
    CHECK(strlen(info.known.failure) == 0);

    uint64_t swapped = 0;
    for (uint64_t i = 0; i < info.known.n_tensors; i++) {
        WITH_ROOM(llama_sidecar_report_tensor) tensor;
        FILLS(tensor, llama_sidecar_report_get_tensor(report, i, &tensor.known));
        CHECK(strlen(tensor.known.name) > 0 && strlen(tensor.known.reason) == 0);
        swapped += tensor.known.outcome == LLAMA_SIDECAR_OUTCOME_SWAPPED;
    }
    CHECK(swapped == info.known.n_swapped);

    WITH_ROOM(llama_sidecar_report_file) file;
    FILLS(file, llama_sidecar_report_get_file(report, 0, &file.known));
    CHECK(strcmp(file.known.path, WORK) == 0);
    CHECK(file.known.event == LLAMA_SIDECAR_FILE_EVENT_TAKEN);
    OK(llama_sidecar_report_free(report));
    OK(llama_sidecar_context_free(context));
}

static void fetch(const char * path) {
    struct llama_model * model = llama_model_load(path, NULL);
    CHECK(model != NULL);
    WITH_ROOM(llama_postfetch_params) params;
    FILLS(params, llama_postfetch_default_params(&params.known));
    CHECK(params.known.max_transfers > 0 && params.known.patience_us > 0);
    params.known.force_cpu = true;
    params.known.struct_size -= 1;
    CHECK(llama_postfetch_init(model, &params.known) == NULL);
    params.known.struct_size += 1;
    struct llama_postfetch * postfetch = llama_postfetch_init(model, &params.known);
    CHECK(postfetch != NULL);

    const int32_t id = 1;
    OK(llama_postfetch_schedule(postfetch, 0, &id, 1));
    WITH_ROOM(llama_postfetch_answer) answer;
    FILLS(answer, llama_postfetch_acquire(postfetch, 0, 1, &answer.known));
    CHECK(answer.known.device_data == 0 && answer.known.host_data != NULL);
    CHECK(answer.known.nbytes == answer.known.row_bytes * answer.known.ne[1]);
    CHECK(answer.known.reason == LLAMA_POSTFETCH_REASON_FORCED);

    WITH_ROOM(llama_postfetch_stats) stats;
    FILLS(stats, llama_postfetch_get_stats(postfetch, &stats.known));
    CHECK(stats.known.n_calls == 1 && stats.known.n_copies == 0);
    CHECK(stats.known.n_fallbacks[LLAMA_POSTFETCH_REASON_FORCED] > 0);
    OK(llama_postfetch_free(postfetch));
    OK(llama_sidecar_model_free(model));
}

int main(int argc, char ** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: %s present|grown MODEL.gguf VARIANT.gguf MOE.gguf\n", argv[0]);
        return 2;
    }
    with_grown_library = strcmp(argv[1], "grown") == 0;
    CHECK(strncmp(llama_sidecar_version(), "0.", 2) == 0);
    point_to(argv[2]);
    struct llama_model * model = load();
    look_at(model);
    swap(model, argv[3]);
    OK(llama_sidecar_model_free(model));
    fetch(argv[4]);
    CHECK(remove(WORK) == 0);
    return 0;
}
