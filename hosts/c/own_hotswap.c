// A stand-in for the hot-swap that libllama of ik_llama.cpp has since June 2026: the function
// that a program calls to reload changed tensors. Loaded beside a host.
#include <stdbool.h>
#include <stdio.h>

bool llama_reload_changed_tensors(void * context);

bool llama_reload_changed_tensors(void * context) {
    (void) context;
    fputs("the program's own hot-swap was called\n", stderr);
    return true;
}
