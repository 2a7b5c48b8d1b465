/**
 * @file llama_sidecar_hooks.h
 *
 * Hooks for a program that evaluates a mixture of experts, under the names of the design documents.
 * docs/documents.md maps each name to the functions of llama_sidecar.h, which these functions call.
 *
 * A context of post-fetch serves one evaluation at a time, as its scheduler does. All functions can be
 * called before postfetch_init and after postfetch_free: the CPU then computes every expert.
 */
#ifndef LLAMA_SIDECAR_HOOKS_H
#define LLAMA_SIDECAR_HOOKS_H

#include "llama_sidecar.h"

#include <stdio.h>
#include <stdlib.h>

#ifdef __cplusplus
#define LLAMA_SIDECAR_HOOK inline
extern "C" {
#else
#define LLAMA_SIDECAR_HOOK static __inline__
#endif

/** Post-fetch of a model. */
struct postfetch_context {
    /** The scheduler, or NULL. */
    struct llama_postfetch * scheduler;
    /** Stream for the program's kernels: a CUstream or cudaStream_t, or NULL without a device. */
    void * compute_stream;
    /** Device memory for experts in bytes; 0 without a device. */
    uint64_t scratchpad_size;
};

/** Starts post-fetch for a model, as the LLAMA_POSTFETCH_* variables state. */
LLAMA_SIDECAR_HOOK void postfetch_init(struct postfetch_context * pf_ctx, const struct llama_model * model) {
    struct llama_postfetch_stats stats;
    pf_ctx->scheduler      = llama_postfetch_init(model, NULL);
    pf_ctx->compute_stream = llama_postfetch_compute_stream(pf_ctx->scheduler);
    stats.struct_size      = sizeof(stats);
    pf_ctx->scratchpad_size =
        llama_postfetch_get_stats(pf_ctx->scheduler, &stats) == LLAMA_SIDECAR_STATUS_OK ? stats.scratchpad_bytes : 0;
}

/** Ends post-fetch. Waits for copies, and for streams that use experts. */
LLAMA_SIDECAR_HOOK void postfetch_free(struct postfetch_context * pf_ctx) {
    llama_postfetch_free(pf_ctx->scheduler);
    pf_ctx->scheduler       = NULL;
    pf_ctx->compute_stream  = NULL;
    pf_ctx->scratchpad_size = 0;
}

/** Starts to copy the down-projections of the routed experts of a layer. Returns at once. */
LLAMA_SIDECAR_HOOK void llama_postfetch_schedule_d_transfers(const int32_t * expert_ids, int n_experts, int layer_idx,
                                                             struct postfetch_context * pf_ctx) {
    if (n_experts > 0 && layer_idx >= 0) {
        llama_postfetch_schedule(pf_ctx->scheduler, (uint32_t) layer_idx, expert_ids, (size_t) n_experts);
    }
}

/** Makes the stream of ggml wait for the work in compute_stream. */
LLAMA_SIDECAR_HOOK void postfetch_sync_with_ggml(void * ggml_stream, struct postfetch_context * pf_ctx) {
    llama_postfetch_hand_back(pf_ctx->scheduler, ggml_stream);
}

/** The functions of the program that compute an expert. `user` is the program's own. */
struct postfetch_moe {
    /** Computes gate and up on the CPU. */
    void (*compute_expert_gu_cpu)(int32_t expert_id, void * user);
    /** Submits gate and up to a stream. NULL: the CPU computes all of them. */
    void (*compute_gu_on_gpu_async)(int32_t expert_id, void * stream, void * user);
    /** Submits down to a stream, which has the weights at d->device_data. NULL: there are no kernels. */
    void (*execute_d_projection_gpu)(int32_t expert_id, const struct llama_postfetch_answer * d, void * stream, void * user);
    /** Computes down on the CPU, with the weights at d->host_data. */
    void (*execute_d_projection_cpu)(int32_t expert_id, const struct llama_postfetch_answer * d, void * user);
    void * user;
};

/**
 * Computes the routed experts of a layer: starts the copies of their down-projections, computes gate and
 * up meanwhile, and then computes each down-projection where its weights are.
 *
 * The work of the device is in compute_stream at the end: call postfetch_sync_with_ggml next.
 *
 * @param expert_ids Different experts of the layer.
 */
LLAMA_SIDECAR_HOOK void dispatch_postfetch_moe(const int32_t * expert_ids, int num_active, int layer_idx,
                                               const struct postfetch_moe * moe, struct postfetch_context * pf_ctx) {
    int i;
    llama_postfetch_schedule_d_transfers(expert_ids, num_active, layer_idx, pf_ctx);
    for (i = 0; i < num_active; i++) {
        struct llama_postfetch_answer d;
        d.struct_size    = sizeof(d);
        d.gate_up_on_cpu = true;
        llama_postfetch_query(pf_ctx->scheduler, (uint32_t) layer_idx, (uint32_t) expert_ids[i], &d);
        if (d.gate_up_on_cpu || pf_ctx->compute_stream == NULL || moe->compute_gu_on_gpu_async == NULL) {
            moe->compute_expert_gu_cpu(expert_ids[i], moe->user);
        } else {
            moe->compute_gu_on_gpu_async(expert_ids[i], pf_ctx->compute_stream, moe->user);
        }
    }
    for (i = 0; i < num_active; i++) {
        const uint32_t                layer = (uint32_t) layer_idx, expert = (uint32_t) expert_ids[i];
        struct llama_postfetch_answer d;
        d.struct_size = sizeof(d);
        d.device_data = 0;
        d.host_data   = NULL;
        if (moe->execute_d_projection_gpu != NULL) {
            llama_postfetch_acquire_on_stream(pf_ctx->scheduler, layer, expert, pf_ctx->compute_stream, &d);
        } else {
            llama_postfetch_query(pf_ctx->scheduler, layer, expert, &d);
            d.device_data = 0;
        }
        if (d.device_data != 0) {
            moe->execute_d_projection_gpu(expert_ids[i], &d, pf_ctx->compute_stream, moe->user);
        } else {
            moe->execute_d_projection_cpu(expert_ids[i], &d, moe->user);
        }
    }
    llama_postfetch_release_layer(pf_ctx->scheduler, (uint32_t) layer_idx);
}

/** Returns whether a tensor holds a matrix of routed experts. */
LLAMA_SIDECAR_HOOK bool is_expert_tensor_name(const char * name) {
    struct llama_sidecar_expert_name found;
    found.struct_size = sizeof(found);
    return llama_sidecar_expert_name_parse(name, &found) == LLAMA_SIDECAR_STATUS_OK;
}

/** Returns the layer of an expert tensor, or -1. */
LLAMA_SIDECAR_HOOK int extract_layer_id_from_name(const char * name) {
    struct llama_sidecar_expert_name found;
    found.struct_size = sizeof(found);
    return llama_sidecar_expert_name_parse(name, &found) == LLAMA_SIDECAR_STATUS_OK ? (int) found.layer : -1;
}

/** Returns the expert of a tensor that holds one, or -1: most files have all experts in one tensor. */
LLAMA_SIDECAR_HOOK int extract_expert_id_from_name(const char * name) {
    struct llama_sidecar_expert_name found;
    found.struct_size = sizeof(found);
    return llama_sidecar_expert_name_parse(name, &found) == LLAMA_SIDECAR_STATUS_OK ? (int) found.expert : -1;
}

/**
 * Starts to count the experts of a model, and to print names if LLAMA_EXPERT_TRACE_NAMES=1.
 *
 * @return The counts, or NULL on failure. llama_expert_trace_free frees them, and prints and writes what
 * LLAMA_EXPERT_TRACE_STATS and LLAMA_EXPERT_TRACE_OUTPUT state.
 */
LLAMA_SIDECAR_HOOK struct llama_expert_trace * init_expert_tracer(const struct llama_model * model) {
    return llama_expert_trace_new(model);
}

/**
 * Counts the use of an expert by a token. A program may call it for each of gate, up and down: the
 * down-projection counts, so that a use counts once.
 *
 * @param tensor_name Name of the tensor that is used.
 */
LLAMA_SIDECAR_HOOK void record_expert_usage(const struct llama_expert_trace * tracer, const char * tensor_name,
                                            int layer_id, int expert_id) {
    struct llama_sidecar_expert_name found;
    found.struct_size = sizeof(found);
    if (layer_id >= 0 && expert_id >= 0 &&
        llama_sidecar_expert_name_parse(tensor_name, &found) == LLAMA_SIDECAR_STATUS_OK &&
        found.projection == LLAMA_SIDECAR_PROJECTION_DOWN) {
        llama_expert_trace_record(tracer, (uint32_t) layer_id, (uint32_t) expert_id);
    }
}

/** Prints the counts to standard error. */
LLAMA_SIDECAR_HOOK void print_expert_stats(const struct llama_expert_trace * tracer) {
    const size_t length = llama_expert_trace_summary(tracer, true, NULL, 0);
    char *       text   = (char *) malloc(length + 1);
    if (length > 0 && text != NULL && llama_expert_trace_summary(tracer, true, text, length + 1) > 0) {
        fputs(text, stderr);
    }
    free(text);
}

/** Writes the counts to a file of JSON. Returns whether that succeeded. */
LLAMA_SIDECAR_HOOK bool export_expert_stats_json(const struct llama_expert_trace * tracer, const char * filename) {
    return llama_expert_trace_write(tracer, filename) == LLAMA_SIDECAR_STATUS_OK;
}

#ifdef __cplusplus
}
#endif

#endif
