// Shared by the examples: macros that end the program with a message when a check fails.
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include <llama_sidecar.h>

#include <stdio.h>
#include <stdlib.h>

// Checks a condition, also in release builds.
#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not true: %s\n  last error: %s\n", __FILE__,    \
                    __LINE__, #condition, llama_sidecar_last_error());              \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

// Checks that a call succeeded.
#define OK(call) CHECK((call) == LLAMA_SIDECAR_STATUS_OK)

static inline struct llama_sidecar_tensor_info tensor_info(const struct llama_model * model,
                                                           uint64_t index) {
    struct llama_sidecar_tensor_info info;
    info.struct_size = sizeof(info);
    OK(llama_sidecar_tensor_get_info(model, index, &info));
    return info;
}

static inline struct llama_sidecar_model_info model_info(const struct llama_model * model) {
    struct llama_sidecar_model_info info;
    info.struct_size = sizeof(info);
    OK(llama_sidecar_model_get_info(model, &info));
    return info;
}

#endif
