// A stand-in for libllama: a small graph over real ggml, kept between evaluations as
// libllama's `process_ubatch` does. It does what no real host can be made to do on
// demand: it waits between the parts of an evaluation, loads two models at once, skips the first reserve, aborts, and
// frees its graph before its scheduler.
#pragma once

#include <stdbool.h>

// Loads `w.weight` [64, 8] and, where the file has them, `norm.weight` [64],
// `blk.0.ffn_down_exps.weight` [64, 64, 4] and `blk.0.ffn_gate_inp.weight` [64, 4]. With
// SMALL_COPIES_EXPERTS in the environment, it evaluates with a copy of the experts; with SMALL_KEEPS_VIEW, with a view
// of the first weight that it keeps. With SMALL_DESCRIPTOR_OF, it opens the file by the number of a descriptor, which is of
// the file that the variable names afterwards.
void small_load(const char * path, bool reserves);

// How the tensors of models get memory that are loaded at once.
enum placement {
    // In the mapping of their file, by threads that work for both models.
    MAPPED,
    // In memory, by such threads.
    READ,
    // In memory, by the thread that opened the file.
    BY_OPENER,
};

// Loads two further models at once: both are open before any tensor has memory.
void small_load_two(const char * first, const char * second, enum placement by);

// Lets evaluations use one of these models: 1 or 2.
void small_use(int number);

// Evaluates; `stall_ms` passes between the begin and the evaluation of the graph, and
// `waits`: whether the results are waited for. Returns the sum of the results, or NaN
// with `*status` set to what ggml returned.
float llama_decode(int stall_ms, bool waits, int * status);

// Opens a model's file for its metadata alone, `count` times on this thread and as often on
// threads of their own.
void small_inspect(const char * path, int count);

// Lets the next graphs multiply with a tensor of ones in memory for weights that is from no file.
void small_derive(const char * name);

struct ggml_tensor;

// Lets ggml call a function before it evaluates a node, and after it; a null pointer ends that.
void small_watch(bool (*callback)(struct ggml_tensor * node, bool before, void * data));

// Makes the next evaluation end early, as an abort callback does.
void small_abort(bool aborts);

// Frees the graph, then the backend, then the scheduler; the memory of the graph is
// overwritten first.
void small_free(void);
