/* Uses post-fetch and the expert trace through the functions of llama_sidecar_hooks.h, in C89.
 *
 * usage: hooks MOE.gguf
 *
 * A program that evaluates a mixture of experts calls these functions where its router has chosen. The
 * products of this example are sums of bytes: those of the bytes on the device and those of the bytes of
 * the file are compared. Without a CUDA device, the CPU computes all experts. */
#include <llama_sidecar_hooks.h>

#include <string.h>

#define CHECK(condition)                                                                                  \
    do {                                                                                                  \
        if (!(condition)) {                                                                               \
            fprintf(stderr, "%s:%d: not true: %s\n  last error: %s\n", __FILE__, __LINE__, #condition,    \
                    llama_sidecar_last_error());                                                          \
            exit(1);                                                                                      \
        }                                                                                                 \
    } while (0)

enum { N_ACTIVE = 2, N_TOKENS = 3 };

/* What the callbacks share. */
struct program {
    struct llama_model *        model;
    struct postfetch_context *  pf_ctx;
    struct llama_expert_trace * tracer;
    int                         layer;
    unsigned long               gate_up, on_device, on_cpu;
};

static uint64_t sum(const void * bytes, uint64_t n) {
    uint64_t all = 0, i;
    for (i = 0; i < n; i++) {
        all = 31 * all + ((const unsigned char *) bytes)[i];
    }
    return all;
}

static void compute_expert_gu_cpu(int32_t expert_id, void * user) {
    struct program * program = (struct program *) user;
    (void) expert_id;
    program->gate_up++;
}

static void compute_gu_on_gpu_async(int32_t expert_id, void * stream, void * user) {
    CHECK(stream != NULL);
    compute_expert_gu_cpu(expert_id, user);
}

static void execute_d_projection_cpu(int32_t expert_id, const struct llama_postfetch_answer * d, void * user) {
    struct program * program = (struct program *) user;
    CHECK(expert_id >= 0 && d->host_data != NULL);
    program->on_cpu++;
}

/* A program with kernels submits one to the stream. This one waits for the copy, and reads it back. */
static void execute_d_projection_gpu(int32_t expert_id, const struct llama_postfetch_answer * d, void * stream,
                                     void * user) {
    struct program *              program = (struct program *) user;
    const uint32_t                layer = (uint32_t) program->layer, expert = (uint32_t) expert_id;
    struct llama_postfetch_answer copied;
    void *                        bytes = malloc((size_t) d->nbytes);
    copied.struct_size                  = sizeof(copied);
    CHECK(bytes != NULL && stream == program->pf_ctx->compute_stream);
    CHECK(llama_postfetch_acquire(program->pf_ctx->scheduler, layer, expert, &copied) == LLAMA_SIDECAR_STATUS_OK);
    if (copied.device_data != 0 && llama_postfetch_download(program->pf_ctx->scheduler, layer, expert, bytes,
                                                            (size_t) d->nbytes) == LLAMA_SIDECAR_STATUS_OK) {
        CHECK(copied.device_data == d->device_data);
        CHECK(sum(bytes, d->nbytes) == sum(d->host_data, d->nbytes));
        program->on_device++;
    } else {
        execute_d_projection_cpu(expert_id, d, user);
    }
    free(bytes);
}

/* Calls the tracer for gate, up and down of an expert, by the names of their tensors. */
static void record(struct program * program, int expert_id) {
    static const char * const MATRICES[] = {"gate", "up", "down"};
    int                       i;
    for (i = 0; i < 3; i++) {
        char name[64];
        sprintf(name, "blk.%d.ffn_%s_exps.weight", program->layer, MATRICES[i]);
        CHECK(is_expert_tensor_name(name) && extract_layer_id_from_name(name) == program->layer);
        CHECK(extract_expert_id_from_name(name) == -1);
        record_expert_usage(program->tracer, name, program->layer, expert_id);
    }
}

int main(int argc, char ** argv) {
    static const char        END[] = ".ffn_down_exps.weight";
    struct postfetch_context pf_ctx;
    struct postfetch_moe     moe;
    struct program           program;
    uint64_t                 n_tensors, i;
    unsigned long            n_layers = 0;
    int                      token;
    CHECK(argc == 2);
    program.model = llama_model_load(argv[1], NULL);
    CHECK(program.model != NULL);
    postfetch_init(&pf_ctx, program.model);
    CHECK(pf_ctx.scheduler != NULL);
    program.tracer = init_expert_tracer(program.model);
    program.pf_ctx = &pf_ctx;
    program.gate_up = program.on_device = program.on_cpu = 0;
    CHECK(program.tracer != NULL);
    moe.compute_expert_gu_cpu    = compute_expert_gu_cpu;
    moe.compute_gu_on_gpu_async  = compute_gu_on_gpu_async;
    moe.execute_d_projection_gpu = execute_d_projection_gpu;
    moe.execute_d_projection_cpu = execute_d_projection_cpu;
    moe.user                     = &program;

    CHECK(llama_sidecar_expert_tensor_count(program.model, &n_tensors) == LLAMA_SIDECAR_STATUS_OK);
    for (token = 0; token < N_TOKENS; token++) {
        for (i = 0; i < n_tensors; i++) {
            struct llama_sidecar_expert_tensor tensor;
            struct llama_sidecar_tensor_info   info;
            int32_t                            expert_ids[N_ACTIVE];
            int                                k;
            tensor.struct_size = sizeof(tensor);
            info.struct_size   = sizeof(info);
            CHECK(llama_sidecar_expert_tensor_get_info(program.model, i, &tensor) == LLAMA_SIDECAR_STATUS_OK);
            CHECK(llama_sidecar_tensor_get_info(program.model, tensor.tensor, &info) == LLAMA_SIDECAR_STATUS_OK);
            if (tensor.projection != LLAMA_SIDECAR_PROJECTION_DOWN || strstr(info.name, END) == NULL) {
                continue;
            }
            program.layer = (int) tensor.layer;
            n_layers++;
            for (k = 0; k < N_ACTIVE; k++) {
                expert_ids[k] = (int32_t) ((unsigned) (token + k) % tensor.n_experts);
                record(&program, expert_ids[k]);
            }
            dispatch_postfetch_moe(expert_ids, N_ACTIVE, program.layer, &moe, &pf_ctx);
            /* The stream of ggml is that of the program's backend. */
            postfetch_sync_with_ggml(pf_ctx.compute_stream, &pf_ctx);
        }
    }
    CHECK(n_layers > 0 && program.gate_up == n_layers * N_ACTIVE);
    CHECK(program.on_device + program.on_cpu == program.gate_up);
    print_expert_stats(program.tracer);
    CHECK(export_expert_stats_json(program.tracer, "hooks.json"));
    CHECK(llama_expert_trace_free(program.tracer) == LLAMA_SIDECAR_STATUS_OK);
    postfetch_free(&pf_ctx);
    printf("%lu experts came from the device, %lu were for the CPU\n", program.on_device, program.on_cpu);
    CHECK(llama_sidecar_model_free(program.model) == LLAMA_SIDECAR_STATUS_OK);
    return 0;
}
