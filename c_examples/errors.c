// Shows the errors of the library: invalid arguments, handles and files, and calls at the wrong
// time. Each error sets a status and a message, and changes nothing.
//
// usage: errors MODEL.gguf

#include "example.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

// Checks that the call fails with this status, and that the message contains these words.
#define FAILS(call, expected, words)                                             \
    do {                                                                         \
        CHECK((call) == (expected));                                             \
        CHECK(llama_sidecar_last_status() == (expected));                        \
        CHECK(strstr(llama_sidecar_last_error(), (words)) != NULL);              \
        printf("%-14s %s\n", llama_sidecar_status_name(expected),                \
               llama_sidecar_last_error());                                      \
    } while (0)

#define LOAD_FAILS(path, params, expected, words)                                \
    do {                                                                         \
        CHECK(llama_model_load((path), (params)) == NULL);                       \
        FAILS(llama_sidecar_last_status(), (expected), (words));                 \
    } while (0)

static const char * const BAD_FILE = "errors_bad.gguf";

static void write_file(const void * bytes, size_t size) {
    FILE * file = fopen(BAD_FILE, "wb");
    CHECK(file != NULL);
    CHECK(fwrite(bytes, 1, size, file) == size);
    CHECK(fclose(file) == 0);
}

static bool stop_at_once(const struct llama_sidecar_load_progress * now, void * unused) {
    (void) now, (void) unused;
    return false;
}

static void * last_error_of_another_thread(void * unused) {
    (void) unused;
    return (void *) (uintptr_t) strlen(llama_sidecar_last_error());
}

static void files(void) {
    LOAD_FAILS("no_such_file.gguf", NULL, LLAMA_SIDECAR_STATUS_NOT_FOUND, "no_such_file.gguf");
    LOAD_FAILS("/", NULL, LLAMA_SIDECAR_STATUS_MALFORMED, "a directory");
    LOAD_FAILS("/dev/null", NULL, LLAMA_SIDECAR_STATUS_MALFORMED, "a special file");
    write_file("", 0);
    LOAD_FAILS(BAD_FILE, NULL, LLAMA_SIDECAR_STATUS_MALFORMED, "ends inside the magic");
    write_file("JPEG....", 8);
    LOAD_FAILS(BAD_FILE, NULL, LLAMA_SIDECAR_STATUS_MALFORMED, "not a GGUF file");
    write_file("GGUF\1\0\0\0", 8);
    LOAD_FAILS(BAD_FILE, NULL, LLAMA_SIDECAR_STATUS_MALFORMED, "version 1");
    write_file("GGUF\0\0\0\3", 8);
    LOAD_FAILS(BAD_FILE, NULL, LLAMA_SIDECAR_STATUS_MALFORMED, "big-endian");
    write_file("GGUF\3\0\0\0\377\377\377\377\377\377\377\177", 16);
    LOAD_FAILS(BAD_FILE, NULL, LLAMA_SIDECAR_STATUS_MALFORMED, "tensors");
    CHECK(remove(BAD_FILE) == 0);
}

static void parameters(const char * path) {
    struct llama_sidecar_params params = {0};
    FAILS(llama_sidecar_default_params(NULL), LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "NULL");
    FAILS(llama_sidecar_default_params(&params), LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "struct_size");
    LOAD_FAILS(path, &params, LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "struct_size");
    params.struct_size = sizeof(params);
    OK(llama_sidecar_default_params(&params));
    params.n_devices = 0;
    LOAD_FAILS(path, &params, LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "n_devices");
    params.n_devices = 2;
    params.device    = 2;
    LOAD_FAILS(path, &params, LLAMA_SIDECAR_STATUS_NOT_FOUND, "device 2");
    CHECK(strstr(llama_sidecar_last_error(), path) != NULL);
    LOAD_FAILS(NULL, NULL, LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "path");

    // The device is too small: nothing is loaded, and the model stays usable.
    params.device       = 1;
    params.device_bytes = 1000;
    struct llama_model * model = llama_model_load(path, &params);
    CHECK(model != NULL);
    FAILS(llama_sidecar_model_load_all(model, NULL, NULL, NULL),
          LLAMA_SIDECAR_STATUS_OUT_OF_MEMORY, "host1");
    CHECK(tensor_info(model, 0).device == -1);
    OK(llama_sidecar_model_free(model));
}

// Tensors of the program that are no model, and a struct that is larger than the library knows.
static void own_tensors(void) {
    static float data[2 * 32 * 4];
    struct newer {
        struct llama_sidecar_tensor_data known;
        char                             more[24];
    } tensors[2];
    memset(tensors, 0xee, sizeof(tensors));
    const char * names[] = {"blk.7.ffn_down_exps.weight", "blk.7.ffn_gate_inp.weight"};
    for (int i = 0; i < 2; i++) {
        tensors[i].known = (struct llama_sidecar_tensor_data) {
            sizeof(tensors[0]), names[i], data, sizeof(data), {32, 4, 2, 1}, 0};
    }
#define REFUSED(n, status, text)                                                  \
    CHECK(llama_sidecar_model_from_tensors(&tensors[0].known, n) == NULL);        \
    FAILS(llama_sidecar_last_status(), status, text)
    CHECK(llama_sidecar_model_from_tensors(NULL, 1) == NULL);
    FAILS(llama_sidecar_last_status(), LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "tensors");
    REFUSED(0, LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "n is 0");
    tensors[1].known.struct_size--;
    REFUSED(2, LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "tensors[1]");
    tensors[1].known.struct_size++;
    tensors[0].known.struct_size = 71;
    REFUSED(2, LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "struct_size");
    tensors[0].known.struct_size = sizeof(tensors[0]);
    tensors[1].known.name        = NULL;
    REFUSED(2, LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "name");
    tensors[1].known.name = names[0];
    REFUSED(2, LLAMA_SIDECAR_STATUS_MALFORMED, names[0]);
    tensors[1].known.name  = names[1];
    tensors[1].known.ne[3] = UINT64_MAX;
    REFUSED(2, LLAMA_SIDECAR_STATUS_MALFORMED, names[1]);
    tensors[1].known.ne[3] = 2;
    REFUSED(2, LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "1024 bytes");
    tensors[1].known.ne[3] = 1;

    struct llama_model * model = llama_sidecar_model_from_tensors(&tensors[0].known, 2);
    CHECK(model != NULL && tensor_info(model, 1).host_data == (const void *) data);
    struct llama_context * context = llama_sidecar_context_new(model);
    struct llama_sidecar_report * report = NULL;
    FAILS(llama_sidecar_reload(context, &report), LLAMA_SIDECAR_STATUS_DISABLED, "hot-swap is off");
    OK(llama_sidecar_context_free(context));
    CHECK(llama_expert_stream_new(model, NULL) == NULL);
    FAILS(llama_sidecar_last_status(), LLAMA_SIDECAR_STATUS_DISABLED, "file");
    struct llama_postfetch * postfetch = llama_postfetch_init(model, NULL);
    CHECK(postfetch != NULL);
    uint32_t layer = 0;
    // Both tensors are at this address; the down-projections are found.
    OK(llama_postfetch_layer_at(postfetch, data, &layer));
    CHECK(layer == 7);
    FAILS(llama_postfetch_layer_at(postfetch, data + 1, &layer), LLAMA_SIDECAR_STATUS_NOT_FOUND,
          "down-projections");
    FAILS(llama_postfetch_layer_at(postfetch, data, NULL), LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "layer");
    OK(llama_postfetch_free(postfetch));
    FAILS(llama_postfetch_layer_at(postfetch, data, &layer), LLAMA_SIDECAR_STATUS_BAD_HANDLE,
          "llama_postfetch");
    OK(llama_sidecar_model_free(model));
}

static void handles(struct llama_model * model, struct llama_context * context) {
    struct llama_sidecar_model_info info;
    info.struct_size = sizeof(info);
    FAILS(llama_sidecar_model_get_info(NULL, &info), LLAMA_SIDECAR_STATUS_BAD_HANDLE, "NULL");
    // A pointer of another library, for example a model of llama.cpp.
    int                  foreign;
    struct llama_model * theirs = (struct llama_model *) (void *) &foreign;
    FAILS(llama_sidecar_model_get_info(theirs, &info), LLAMA_SIDECAR_STATUS_BAD_HANDLE,
          "not a handle of llama-sidecar");
    FAILS(llama_sidecar_model_free(theirs), LLAMA_SIDECAR_STATUS_BAD_HANDLE, "not a handle");
    // A context where a model is expected.
    FAILS(llama_sidecar_model_get_info((struct llama_model *) (void *) context, &info),
          LLAMA_SIDECAR_STATUS_BAD_HANDLE, "another kind");
    CHECK(!llama_reload_changed_tensors((struct llama_context *) (void *) model));
    FAILS(llama_sidecar_last_status(), LLAMA_SIDECAR_STATUS_BAD_HANDLE, "another kind");
    CHECK(!llama_reload_changed_tensors(NULL));
    CHECK(llama_sidecar_context_new(NULL) == NULL);
    OK(llama_sidecar_model_free(NULL));
    OK(llama_sidecar_context_free(NULL));
    OK(llama_sidecar_report_free(NULL));
}

static void lookups(const struct llama_model * model) {
    const uint64_t                   count = model_info(model).n_tensors;
    struct llama_sidecar_tensor_info tensor;
    tensor.struct_size = sizeof(tensor);
    char     byte;
    uint64_t index;
    FAILS(llama_sidecar_tensor_get_info(model, count, &tensor), LLAMA_SIDECAR_STATUS_NOT_FOUND,
          "does not exist");
    FAILS(llama_sidecar_tensor_load(model, UINT64_MAX), LLAMA_SIDECAR_STATUS_NOT_FOUND, "tensor");
    FAILS(llama_sidecar_tensor_find(model, "no.such.weight", &index),
          LLAMA_SIDECAR_STATUS_NOT_FOUND, "no.such.weight");
    FAILS(llama_sidecar_tensor_find(model, NULL, &index), LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "name");
    FAILS(llama_sidecar_tensor_find(model, tensor_info(model, 0).name, NULL),
          LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "index");
    FAILS(llama_sidecar_tensor_get_info(model, 0, NULL), LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "NULL");
    FAILS(llama_sidecar_tensor_read(model, 0, UINT64_MAX, &byte, 1),
          LLAMA_SIDECAR_STATUS_NOT_FOUND, "byte range");
    FAILS(llama_sidecar_tensor_read(model, 0, 0, NULL, 1), LLAMA_SIDECAR_STATUS_BAD_ARGUMENT,
          "buffer");
    FAILS(llama_sidecar_metadata_find(model, "no.such.key", &index),
          LLAMA_SIDECAR_STATUS_NOT_FOUND, "no.such.key");
    FAILS(llama_sidecar_metadata_text(model, 0, 1, &byte, 1, NULL), LLAMA_SIDECAR_STATUS_NOT_FOUND,
          "element 1");
    FAILS(llama_sidecar_metadata_text(model, 1u << 30, 0, &byte, 1, NULL),
          LLAMA_SIDECAR_STATUS_NOT_FOUND, "metadata key");
    struct llama_sidecar_expert_name name;
    name.struct_size = sizeof(name);
    FAILS(llama_sidecar_expert_name_parse("blk.0.ffn_down.weight", &name),
          LLAMA_SIDECAR_STATUS_NOT_FOUND, "blk.0.ffn_down.weight");
    FAILS(llama_sidecar_expert_name_parse(NULL, &name), LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "name");
    FAILS(llama_sidecar_expert_name_parse("blk.0.ffn_down_exps.weight", NULL),
          LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "NULL");
    name.struct_size = 8;
    FAILS(llama_sidecar_expert_name_parse("blk.0.ffn_down_exps.weight", &name),
          LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "struct_size");
    struct llama_sidecar_expert_tensor expert;
    expert.struct_size = sizeof(expert);
    OK(llama_sidecar_expert_tensor_count(model, &index));
    FAILS(llama_sidecar_expert_tensor_get_info(model, index, &expert),
          LLAMA_SIDECAR_STATUS_NOT_FOUND, "expert tensor");
    FAILS(llama_sidecar_expert_tensor_count(model, NULL), LLAMA_SIDECAR_STATUS_BAD_ARGUMENT,
          "count");
    FAILS(llama_sidecar_expert_tensor_count(NULL, &index), LLAMA_SIDECAR_STATUS_BAD_HANDLE, "NULL");
    struct llama_sidecar_device_info device;
    device.struct_size = sizeof(device);
    FAILS(llama_sidecar_device_get_info(model, 1, &device), LLAMA_SIDECAR_STATUS_NOT_FOUND,
          "device 1");
}

// The library writes only the fields that both know: no byte after the struct of a program that was
// built with an older header, or after the fields of the library for a newer header. A struct
// smaller than that of version 0.1 is refused. `call` fills `room.known`.
#define FILLS(type, size_in_0_1, call)                                           \
    do {                                                                         \
        union {                                                                  \
            struct type   known;                                                 \
            unsigned char bytes[1024];                                           \
        } room;                                                                  \
        const size_t sizes[]   = {(size_in_0_1), sizeof(room)};                  \
        const size_t written[] = {(size_in_0_1), sizeof(room.known)};            \
        for (int size = 0; size < 2; size++) {                                   \
            memset(&room, 0xee, sizeof(room));                                   \
            room.known.struct_size = sizes[size];                                \
            OK(call);                                                            \
            CHECK(room.known.struct_size == sizes[size]);                        \
            for (size_t i = written[size]; i < sizeof(room); i++) {              \
                CHECK(room.bytes[i] == 0xee);                                    \
            }                                                                    \
        }                                                                        \
        room.known.struct_size = (size_in_0_1) - 1;                              \
        FAILS(call, LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "struct_size");           \
    } while (0)

static void struct_sizes(const struct llama_model * model) {
    FILLS(llama_sidecar_params, 56, llama_sidecar_default_params(&room.known));
    FILLS(llama_sidecar_model_info, 80, llama_sidecar_model_get_info(model, &room.known));
    FILLS(llama_sidecar_device_info, 120, llama_sidecar_device_get_info(model, 0, &room.known));
    FILLS(llama_sidecar_metadata_info, 32, llama_sidecar_metadata_get_info(model, 0, &room.known));
    FILLS(llama_sidecar_tensor_info, 168, llama_sidecar_tensor_get_info(model, 0, &room.known));
    OK(llama_sidecar_tensor_load(model, 1));
    FILLS(llama_sidecar_tensor_part, 48, llama_sidecar_tensor_get_part(model, 1, 0, &room.known));
    FILLS(llama_sidecar_expert_name, 24,
          llama_sidecar_expert_name_parse("blk.0.ffn_down_exps.weight", &room.known));
    FILLS(llama_postfetch_params, 56, llama_postfetch_default_params(&room.known));
    FILLS(llama_expert_stream_params, 16, llama_expert_stream_default_params(&room.known));
}

static int n_logged = 0;

// A callback may come while the library holds locks that the call would wait for.
static void log_that_reloads(uint32_t level, const char * text, void * context) {
    struct llama_sidecar_report * report = NULL;
    CHECK(level > 0 && strlen(text) > 0);
    FAILS(llama_sidecar_reload((struct llama_context *) context, &report),
          LLAMA_SIDECAR_STATUS_BUSY, "log callback");
    n_logged++;
}

static void callbacks(const char * path) {
    CHECK(symlink(path, BAD_FILE) == 0);
    struct llama_sidecar_params params;
    params.struct_size = sizeof(params);
    OK(llama_sidecar_default_params(&params));
    // Not a value that a C compiler writes. It counts as true.
    memset(&params.hotswap, 2, 1);
    struct llama_model * model = llama_model_load(BAD_FILE, &params);
    CHECK(model != NULL);
    struct llama_context * context = llama_sidecar_context_new(model);
    CHECK(context != NULL);
    // The link is replaced by a file that is ignored, which is logged.
    CHECK(remove(BAD_FILE) == 0);
    write_file("JPEG....", 8);
    OK(llama_sidecar_log_set(log_that_reloads, context));
    struct llama_sidecar_report * report = NULL;
    OK(llama_sidecar_reload(context, &report));
    OK(llama_sidecar_log_set(NULL, NULL));
    CHECK(n_logged == 1);
    OK(llama_sidecar_report_free(report));
    OK(llama_sidecar_context_free(context));
    OK(llama_sidecar_model_free(model));
    CHECK(remove(BAD_FILE) == 0);
}

static void report_sizes(const char * path) {
    struct llama_sidecar_params params;
    params.struct_size = sizeof(params);
    OK(llama_sidecar_default_params(&params));
    params.hotswap             = true;
    struct llama_model * model = llama_model_load(path, &params);
    CHECK(model != NULL);
    FILLS(llama_sidecar_load_report, 40,
          llama_sidecar_model_load_all(model, NULL, NULL, &room.known));
    struct llama_context * context = llama_sidecar_context_new(model);
    CHECK(context != NULL);
    struct llama_sidecar_report * report = NULL;
    OK(llama_sidecar_reload(context, &report));
    FILLS(llama_sidecar_report_info, 160, llama_sidecar_report_get_info(report, &room.known));
    OK(llama_sidecar_report_free(report));
    OK(llama_sidecar_context_free(context));
    OK(llama_sidecar_model_free(model));
}

static void streams(const struct llama_model * model) {
    struct llama_expert_stream_params params = {0};
    FAILS(llama_expert_stream_default_params(NULL), LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "NULL");
    FAILS(llama_expert_stream_default_params(&params), LLAMA_SIDECAR_STATUS_BAD_ARGUMENT,
          "struct_size");
    params.struct_size = sizeof(params);
    OK(llama_expert_stream_default_params(&params));
    CHECK(params.n_threads > 0);
    CHECK(llama_expert_stream_new(NULL, &params) == NULL);
    FAILS(llama_sidecar_last_status(), LLAMA_SIDECAR_STATUS_BAD_HANDLE, "NULL");
    struct llama_expert_stream * stream = llama_expert_stream_new(model, &params);
    if (stream == NULL) { // not a mixture of experts
        FAILS(llama_sidecar_last_status(), LLAMA_SIDECAR_STATUS_NOT_FOUND, "no routed experts");
    }
    OK(llama_expert_stream_free(stream));
    params.n_threads = 0;
    CHECK(llama_expert_stream_new(model, &params) == NULL);
    FAILS(llama_sidecar_last_status(), LLAMA_SIDECAR_STATUS_BAD_ARGUMENT, "n_threads");
    FAILS(llama_expert_stream_finish(NULL), LLAMA_SIDECAR_STATUS_BAD_HANDLE, "NULL");
    OK(llama_expert_stream_free(NULL));
}

static void moments(struct llama_model * model, struct llama_context * context) {
    FAILS(llama_sidecar_eval_end(context), LLAMA_SIDECAR_STATUS_BUSY, "does not evaluate");
    OK(llama_sidecar_eval_begin(context, NULL));
    FAILS(llama_sidecar_eval_begin(context, NULL), LLAMA_SIDECAR_STATUS_BUSY, "already evaluates");
    OK(llama_sidecar_eval_end(context));
    struct llama_sidecar_report * report = NULL;
    FAILS(llama_sidecar_reload(context, &report), LLAMA_SIDECAR_STATUS_DISABLED,
          "LLAMA_HOTSWAP_ENABLED");
    CHECK(report == NULL);
    FAILS(llama_sidecar_model_load_all(model, stop_at_once, NULL, NULL),
          LLAMA_SIDECAR_STATUS_CANCELLED, "cancelled");
    CHECK(tensor_info(model, 0).device == -1);
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL.gguf\n", argv[0]);
        return 2;
    }
    // In an installed tree, header and library have the same version.
    CHECK(strcmp(llama_sidecar_version(), LLAMA_SIDECAR_VERSION) == 0);
    CHECK(LLAMA_SIDECAR_VERSION_NUMBER == LLAMA_SIDECAR_VERSION_MAJOR * 1000000 +
                                              LLAMA_SIDECAR_VERSION_MINOR * 1000 +
                                              LLAMA_SIDECAR_VERSION_PATCH);
    CHECK(strlen(llama_sidecar_last_error()) == 0);
    CHECK(llama_sidecar_last_status() == LLAMA_SIDECAR_STATUS_OK);
    files();
    parameters(argv[1]);
    own_tensors();

    struct llama_sidecar_params params;
    params.struct_size = sizeof(params);
    OK(llama_sidecar_default_params(&params));
    params.hotswap             = false;
    struct llama_model * model = llama_model_load(argv[1], &params);
    CHECK(model != NULL);
    struct llama_context * context = llama_sidecar_context_new(model);
    CHECK(context != NULL);
    handles(model, context);
    lookups(model);
    struct_sizes(model);
    callbacks(argv[1]);
    report_sizes(argv[1]);
    moments(model, context);
    streams(model);

    // The last error of a thread is not visible to other threads.
    pthread_t thread;
    void *    length;
    CHECK(pthread_create(&thread, NULL, last_error_of_another_thread, NULL) == 0);
    CHECK(pthread_join(thread, &length) == 0);
    CHECK(length == NULL);

    // A freed handle is refused. The context keeps the model alive.
    OK(llama_sidecar_model_free(model));
    FAILS(llama_sidecar_model_free(model), LLAMA_SIDECAR_STATUS_BAD_HANDLE, "was freed");
    OK(llama_sidecar_eval_begin(context, NULL));
    OK(llama_sidecar_context_free(context)); // also ends the evaluation
    FAILS(llama_sidecar_eval_end(context), LLAMA_SIDECAR_STATUS_BAD_HANDLE, "was freed");
    CHECK(strcmp(llama_sidecar_status_name(1000), "unknown status") == 0);
    return 0;
}
