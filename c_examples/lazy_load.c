// Opens a model, reads three tensors in place, and checks that the rest was not read: the resident
// memory of the process grows by these three only. Then loads all tensors in at most nine
// allocations.
//
// usage: lazy_load MODEL.gguf

#include "example.h"

#include <inttypes.h>
#include <string.h>

// Resident bytes of mapped files.
static uint64_t resident_file_bytes(void) {
    FILE * status = fopen("/proc/self/status", "r");
    CHECK(status != NULL);
    char               line[256];
    unsigned long long kib   = 0;
    int                found = 0;
    while (fgets(line, sizeof(line), status) != NULL) {
        found |= sscanf(line, "RssFile: %llu kB", &kib) == 1;
    }
    fclose(status);
    CHECK(found);
    return (uint64_t) kib * 1024;
}

// Reads every byte in place.
static uint64_t touch(const struct llama_sidecar_tensor_info * t) {
    CHECK(t->host_data != NULL);
    const uint8_t * bytes = t->host_data;
    uint64_t        sum   = 0;
    for (uint64_t i = 0; i < t->nbytes; i++) {
        sum += bytes[i];
    }
    return sum;
}

// Prints one line for each tenth of the bytes. Returns whether to go on.
static bool show_progress(const struct llama_sidecar_load_progress * now, void * user_data) {
    uint64_t * tenths = user_data;
    CHECK(now->done <= now->total && now->n_done <= now->n_tensors);
    if (now->done * 10 >= *tenths * now->total) {
        *tenths = now->done * 10 / now->total + 1;
        printf("%" PRIu64 "/%" PRIu64 " tensors, %3" PRIu64 " %%, %s\n", now->n_done, now->n_tensors,
               now->done * 100 / now->total, now->name);
    }
    return true;
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL.gguf\n", argv[0]);
        return 2;
    }
    struct llama_model * model = llama_model_load(argv[1], NULL);
    CHECK(model != NULL);
    const struct llama_sidecar_model_info info   = model_info(model);
    const uint64_t                        before = resident_file_bytes();

    uint64_t touched = 0;
    for (int i = 0; i < 3; i++) {
        const struct llama_sidecar_tensor_info t = tensor_info(model, info.n_tensors * i / 3 + 1);
        printf("touched %-28s %10" PRIu64 " bytes in place, sum %" PRIu64 "\n", t.name, t.nbytes,
               touch(&t));
        touched += t.nbytes;
    }
    const uint64_t grown = resident_file_bytes() - before;
    printf("resident memory grew by %" PRIu64 " bytes for %" PRIu64 " bytes touched, of %" PRIu64
           " in the file\n",
           grown, touched, info.file_bytes);
    // So the rest was not read. The kernel also maps neighbouring pages that are in the page cache: at each end of a tensor up
    // to a huge page of 2 MiB.
    CHECK(grown < touched + 3 * 2 * (2u << 20));

    // Loads one tensor into a buffer of its own. Its data is the same.
    const struct llama_sidecar_tensor_info in_file = tensor_info(model, 1);
    OK(llama_sidecar_tensor_load(model, 1));
    const struct llama_sidecar_tensor_info loaded = tensor_info(model, 1);
    CHECK(loaded.device == 0 && loaded.device_data != 0);
    CHECK(loaded.host_data != in_file.host_data);
    CHECK(memcmp(loaded.host_data, in_file.host_data, loaded.nbytes) == 0);

    // Loads all other tensors.
    uint64_t                         tenths = 0;
    struct llama_sidecar_load_report report;
    report.struct_size = sizeof(report);
    OK(llama_sidecar_model_load_all(model, show_progress, &tenths, &report));
    printf("loaded %" PRIu64 " tensors, %" PRIu64 " bytes, in %" PRIu64 " allocation(s), %" PRIu64
           " us\n",
           report.n_tensors, report.bytes, report.allocations, report.time_us);
    CHECK(report.n_tensors == info.n_tensors - 1);
    CHECK(report.allocations <= 9);
    CHECK(tenths == 11); // the last call has all bytes

    OK(llama_sidecar_model_free(model));
    return 0;
}
