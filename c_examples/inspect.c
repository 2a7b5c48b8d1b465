// Prints the metadata and the tensors of a GGUF file.
//
// usage: inspect MODEL.gguf

#include "example.h"

#include <inttypes.h>

static void print_metadata(const struct llama_model * model, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        struct llama_sidecar_metadata_info key;
        key.struct_size = sizeof(key);
        OK(llama_sidecar_metadata_get_info(model, i, &key));
        char   text[60] = "";
        size_t length   = 0;
        // Reads each element of an array; prints the last one.
        for (uint64_t e = 0; e < key.count; e++) {
            OK(llama_sidecar_metadata_text(model, i, e, text, sizeof(text), &length));
        }
        if (key.is_array) {
            printf("%-45s [%" PRIu64 " elements] ... ", key.key, key.count);
        } else {
            printf("%-45s ", key.key);
        }
        printf("%s%s\n", text, length >= sizeof(text) ? "..." : "");
    }
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL.gguf\n", argv[0]);
        return 2;
    }
    struct llama_model * model = llama_model_load(argv[1], NULL);
    if (model == NULL) {
        fprintf(stderr, "%s\n", llama_sidecar_last_error());
        return 1;
    }

    const struct llama_sidecar_model_info info = model_info(model);
    printf("GGUF version %" PRIu32 ", %" PRIu64 " file(s), %" PRIu64 " bytes, %" PRIu64
           " tensors\n\n",
           info.gguf_version, info.n_files, info.file_bytes, info.n_tensors);
    print_metadata(model, info.n_metadata);
    putchar('\n');

    uint64_t bytes = 0;
    for (uint64_t i = 0; i < info.n_tensors; i++) {
        const struct llama_sidecar_tensor_info t = tensor_info(model, i);
        printf("%-40s %-8s %8" PRIu64 " x %8" PRIu64 " x %4" PRIu64 " x %4" PRIu64
               " %12" PRIu64 " bytes\n",
               t.name, t.type_name, t.ne[0], t.ne[1], t.ne[2], t.ne[3], t.nbytes);
        CHECK(t.device == -1); // nothing was loaded
        bytes += t.nbytes;
    }
    CHECK(bytes <= info.file_bytes);
    OK(llama_sidecar_model_free(model));
    return 0;
}
