// Makes and sets a program's schedulers as the program does not. Loaded before the drop-in. SCHEDULERS:
//
//   no-copy-callback    no scheduler gets the program's copy callback
//   late-copy-callback  each scheduler gets it after some evaluations
//   parallel            each scheduler has several copies of its inputs (pipeline parallelism)
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define SCHEDULERS 16
#define EVALUATIONS 4

typedef void (*setter_t)(void * sched, void * callback, void * data);
typedef int (*compute_t)(void * sched, void * graph);
typedef void * (*maker_t)(void * backends, void * types, int count, size_t size, bool parallel, bool offload);

void ggml_backend_sched_set_copy_callback(void * sched, void * callback, void * data);
int ggml_backend_sched_graph_compute_async(void * sched, void * graph);
void * ggml_backend_sched_new(void * backends, void * types, int count, size_t size, bool parallel, bool offload);

static struct {
    void * sched;
    void * callback;
    void * data;
    int left;
} kept[SCHEDULERS];

// Sets a pointer to the function of this name behind this library.
static void next(const char * name, void * pointer) {
    void * found = dlsym(RTLD_NEXT, name);
    memcpy(pointer, &found, sizeof found);
}

static bool is_wanted(const char * what) {
    const char * wanted = getenv("SCHEDULERS");
    return wanted && strcmp(wanted, what) == 0;
}

void * ggml_backend_sched_new(void * backends, void * types, int count, size_t size, bool parallel, bool offload) {
    maker_t maker;
    next("ggml_backend_sched_new", &maker);
    return maker(backends, types, count, size, parallel || is_wanted("parallel"), offload);
}

static void set(void * sched, void * callback, void * data) {
    setter_t setter;
    next("ggml_backend_sched_set_copy_callback", &setter);
    setter(sched, callback, data);
}

void ggml_backend_sched_set_copy_callback(void * sched, void * callback, void * data) {
    if (is_wanted("no-copy-callback")) {
        set(sched, NULL, NULL);
        return;
    }
    if (!is_wanted("late-copy-callback")) {
        set(sched, callback, data);
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
    compute_t compute;
    next("ggml_backend_sched_graph_compute_async", &compute);
    return compute(sched, graph);
}
