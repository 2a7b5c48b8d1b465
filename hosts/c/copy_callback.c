// Sets the copy callback of a program's schedulers as the program does not. Loaded before the drop-in.
// COPY_CALLBACK:
//
//   none    no scheduler gets the program's callback
//   late    each scheduler gets it after some evaluations
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define SCHEDULERS 16
#define EVALUATIONS 4

typedef void (*setter_t)(void * sched, void * callback, void * data);
typedef int (*compute_t)(void * sched, void * graph);

void ggml_backend_sched_set_copy_callback(void * sched, void * callback, void * data);
int ggml_backend_sched_graph_compute_async(void * sched, void * graph);

static struct {
    void * sched;
    void * callback;
    void * data;
    int left;
} kept[SCHEDULERS];

static void set(void * sched, void * callback, void * data) {
    void * next = dlsym(RTLD_NEXT, "ggml_backend_sched_set_copy_callback");
    setter_t setter;
    memcpy(&setter, &next, sizeof setter);
    setter(sched, callback, data);
}

void ggml_backend_sched_set_copy_callback(void * sched, void * callback, void * data) {
    const char * how = getenv("COPY_CALLBACK");
    if (how && strcmp(how, "none") == 0) {
        set(sched, NULL, NULL);
        return;
    }
    for (int i = 0; i < SCHEDULERS; i++) {
        // A new scheduler can be where a freed one was.
        if (!kept[i].sched || kept[i].sched == sched) {
            kept[i].sched = sched;
            kept[i].callback = callback;
            kept[i].data = data;
            kept[i].left = EVALUATIONS;
            return;
        }
    }
    abort();
}

int ggml_backend_sched_graph_compute_async(void * sched, void * graph) {
    for (int i = 0; i < SCHEDULERS; i++) {
        if (kept[i].sched == sched && kept[i].left > 0 && --kept[i].left == 0) {
            set(sched, kept[i].callback, kept[i].data);
        }
    }
    void * next = dlsym(RTLD_NEXT, "ggml_backend_sched_graph_compute_async");
    compute_t compute;
    memcpy(&compute, &next, sizeof compute);
    return compute(sched, graph);
}
