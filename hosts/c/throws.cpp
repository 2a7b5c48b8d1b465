// An evaluation that a C++ exception leaves: a callback of the program throws while ggml evaluates.
extern "C" {
#include "small_llama.h"

void small_throw(void);
}

static bool throws(struct ggml_tensor *, bool, void *) { throw 1; }

void small_throw(void) {
    small_watch(throws);
    try {
        int status;
        llama_decode(0, true, &status);
    } catch (int) {
    }
    small_watch(nullptr);
}
