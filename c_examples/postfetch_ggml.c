// Uses post-fetch in a program that has ggml_tensors and builds ggml graphs of its own, as llama.cpp does.
//
//   1. A graph chooses experts. llama_postfetch_schedule takes these ids; it returns at once.
//   2. A graph computes gate and up (MUL_MAT_ID) while the down-projections are copied to the GPU.
//   3. For each expert, llama_postfetch_acquire gives a device address or the answer "use the CPU".
//      The program makes a ggml_tensor of the answer and computes MUL_MAT_ID with it.
//
// The example also computes MUL_MAT_ID with its own tensors, and compares both results bit for bit.
// It ends with 0 only if all of them are equal.
//
// usage: postfetch_ggml MOE.gguf [TOKENS]
//
// It links ggml-base and ggml-cpu of a llama.cpp, so it computes on the CPU: what is on the device
// is first read back. A program with a kernel for the device leaves that out, see `acquire`. Only
// the experts of the model are computed: attention, biases and the weights of norms are left out.
#include "example.h"

#include <ggml-cpu.h>
#include <ggml.h>
#include <gguf.h>

#include <string.h>

enum { N_THREADS = 2, MOST_EXPERTS = 1024, ACTIVATIONS = 64 << 20 };

// What one layer has. The tensors and their data belong to this program.
struct layer {
    uint32_t             number;
    struct ggml_tensor * router;
    struct ggml_tensor * gate;
    struct ggml_tensor * up;
    struct ggml_tensor * down;
};

// Makes a tensor whose data is memory that the program already has. ggml only stores the address.
static struct ggml_tensor * tensor_at(struct ggml_context * ctx, uint32_t type, const uint64_t ne[3],
                                      const void * data) {
    ggml_set_no_alloc(ctx, true);
    struct ggml_tensor * tensor = ggml_new_tensor_3d(ctx, (enum ggml_type) type, (int64_t) ne[0],
                                                     (int64_t) ne[1], (int64_t) ne[2]);
    ggml_set_no_alloc(ctx, false);
    CHECK(tensor != NULL && data != NULL);
    tensor->data = (void *) (uintptr_t) data; // only read
    return tensor;
}

// Makes a model of the tensors of experts, where they are. The library opens no file.
static struct llama_model * model_of(struct ggml_context * weights) {
    static struct llama_sidecar_tensor_data experts[MOST_EXPERTS];
    size_t                                  n = 0;
    for (struct ggml_tensor * tensor = ggml_get_first_tensor(weights); tensor != NULL;
         tensor = ggml_get_next_tensor(weights, tensor)) {
        if (strstr(ggml_get_name(tensor), "_exps.weight") == NULL) {
            continue;
        }
        CHECK(n < MOST_EXPERTS && ggml_is_contiguous(tensor));
        struct llama_sidecar_tensor_data * data = &experts[n++];
        data->struct_size = sizeof(*data);
        data->name        = ggml_get_name(tensor);
        data->data        = tensor->data;
        data->nbytes      = ggml_nbytes(tensor);
        data->ggml_type   = (uint32_t) tensor->type;
        for (int i = 0; i < 4; i++) {
            data->ne[i] = (uint64_t) tensor->ne[i];
        }
    }
    return llama_sidecar_model_from_tensors(experts, n);
}

// Finds the tensors of a block. Returns false if the block has no experts, or does not exist.
static bool find_layer(struct ggml_context * weights, const struct llama_postfetch * postfetch, int block,
                       struct layer * layer) {
    const char * names[] = {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"};
    struct ggml_tensor ** tensors[] = {&layer->router, &layer->gate, &layer->up, &layer->down};
    for (int i = 0; i < 4; i++) {
        char name[64];
        snprintf(name, sizeof(name), "blk.%d.%s.weight", block, names[i]);
        *tensors[i] = ggml_get_tensor(weights, name);
        if (*tensors[i] == NULL) {
            return false;
        }
    }
    // Other tensors, as those of a LoRA adapter, have no layer, and are not for post-fetch.
    OK(llama_postfetch_layer_at(postfetch, layer->down->data, &layer->number));
    CHECK(llama_postfetch_layer_at(postfetch, layer->router->data, &layer->number) ==
          LLAMA_SIDECAR_STATUS_NOT_FOUND);
    return true;
}

// Returns how many experts a token uses, by the metadata of the model.
static int64_t experts_used(const struct gguf_context * file) {
    const int64_t architecture = gguf_find_key(file, "general.architecture");
    CHECK(architecture >= 0);
    char key[128];
    snprintf(key, sizeof(key), "%s.expert_used_count", gguf_get_val_str(file, architecture));
    const int64_t count = gguf_find_key(file, key);
    CHECK(count >= 0);
    return gguf_get_val_u32(file, count);
}

static struct ggml_context * new_context(size_t bytes) {
    struct ggml_context * ctx = ggml_init((struct ggml_init_params) {bytes, NULL, false});
    CHECK(ctx != NULL);
    return ctx;
}

static void compute(struct ggml_context * ctx, struct ggml_cgraph * graph) {
    CHECK(ggml_graph_compute_with_ctx(ctx, graph, N_THREADS) == GGML_STATUS_SUCCESS);
}

// Returns a routed id. ggml_top_k can return a view with longer rows, so the stride counts.
static int32_t id_at(const struct ggml_tensor * ids, int64_t k, int64_t token) {
    return *(const int32_t *) ((const char *) ids->data + (size_t) token * ids->nb[1] + (size_t) k * ids->nb[0]);
}

// Makes a tensor for the down-projection of one expert, from what post-fetch answers.
static struct ggml_tensor * acquire(struct ggml_context * ctx, const struct llama_postfetch * postfetch,
                                    uint32_t layer, uint32_t expert, bool * on_device) {
    struct llama_postfetch_answer answer;
    answer.struct_size = sizeof(answer);
    // Waits for the copy of this expert, and for no other.
    OK(llama_postfetch_acquire(postfetch, layer, expert, &answer));
    *on_device = answer.device_data != 0;
    const uint64_t ne[] = {answer.ne[0], answer.ne[1], 1};
    if (!*on_device) {
        // The reason is in the answer: no device, no free memory, a failed copy ... The bytes are the same.
        return tensor_at(ctx, answer.ggml_type, ne, answer.host_data);
    }
    // A program with a kernel for the device gives it this address: as the tensor's `data` in a graph
    // for ggml's CUDA backend, or as an argument of its own kernel. The CPU cannot read it.
    struct ggml_tensor * copy = ggml_new_tensor_3d(ctx, (enum ggml_type) answer.ggml_type,
                                                   (int64_t) ne[0], (int64_t) ne[1], 1);
    CHECK(ggml_nbytes(copy) == answer.nbytes);
    OK(llama_postfetch_download(postfetch, layer, expert, copy->data, answer.nbytes));
    return copy;
}

struct figures {
    uint64_t from_device, from_host, different;
};

// Computes the experts of a layer for some tokens, and adds the result to the hidden state.
static void run_layer(const struct llama_postfetch * postfetch, const struct layer * layer,
                      float * hidden, int64_t n_tokens, int64_t n_used, struct figures * figures) {
    const int64_t n = layer->down->ne[1], n_experts = layer->down->ne[2];
    CHECK(n_experts <= MOST_EXPERTS && n_used <= n_experts);
    const size_t n_distinct = (size_t) (n_tokens * n_used < n_experts ? n_tokens * n_used : n_experts);
    struct ggml_context * ctx = new_context(ACTIVATIONS + n_distinct * (layer->down->nb[2] + 4096));

    // 1. The router. From here on the ids are known.
    struct ggml_tensor * x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, n_tokens);
    memcpy(x->data, hidden, ggml_nbytes(x));
    struct ggml_tensor * normal = ggml_rms_norm(ctx, x, 1e-5f);
    struct ggml_tensor * ids = ggml_top_k(ctx, ggml_mul_mat(ctx, layer->router, normal), (int) n_used);
    struct ggml_cgraph * routing = ggml_new_graph(ctx);
    ggml_build_forward_expand(routing, ids);
    compute(ctx, routing);
    for (int64_t token = 0; token < n_tokens; token++) {
        int32_t row[MOST_EXPERTS];
        for (int64_t k = 0; k < n_used; k++) {
            row[k] = id_at(ids, k, token);
        }
        // An expert that an earlier token uses, too, is copied once.
        OK(llama_postfetch_schedule(postfetch, layer->number, row, (size_t) n_used));
    }

    // 2. Gate and up. The copies are in flight.
    struct ggml_tensor * input = ggml_reshape_3d(ctx, normal, n, 1, n_tokens);
    struct ggml_tensor * gate  = ggml_silu(ctx, ggml_mul_mat_id(ctx, layer->gate, input, ids));
    struct ggml_tensor * both  = ggml_mul(ctx, gate, ggml_mul_mat_id(ctx, layer->up, input, ids));
    struct ggml_cgraph * first = ggml_new_graph(ctx);
    ggml_build_forward_expand(first, both);
    compute(ctx, first);

    // 3. Down. ggml's MUL_MAT_ID expects experts at equal distances, and those of post-fetch lie where
    // memory was free. So each routed id gets a product of one expert, number 0 of its own tensor.
    struct ggml_tensor * experts[MOST_EXPERTS] = {NULL};
    bool                 on_device[MOST_EXPERTS];
    struct ggml_tensor * zero = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, 1);
    *(int32_t *) zero->data   = 0;
    const size_t         n_products = (size_t) (n_tokens * n_used);
    struct ggml_tensor ** products = calloc(n_products, sizeof(*products));
    CHECK(products != NULL);
    struct ggml_cgraph * ours = ggml_new_graph_custom(ctx, 4 * n_products + 16, false);
    for (size_t i = 0; i < n_products; i++) {
        const size_t  token = i / (size_t) n_used, k = i % (size_t) n_used;
        const int32_t id    = id_at(ids, (int64_t) k, (int64_t) token);
        if (experts[id] == NULL) {
            experts[id] = acquire(ctx, postfetch, layer->number, (uint32_t) id, &on_device[id]);
        }
        figures->from_device += on_device[id];
        figures->from_host   += !on_device[id];
        struct ggml_tensor * column = ggml_view_3d(ctx, both, both->ne[0], 1, 1, both->nb[1], both->nb[2],
                                                   token * both->nb[2] + k * both->nb[1]);
        products[i] = ggml_mul_mat_id(ctx, experts[id], column, zero);
        ggml_build_forward_expand(ours, products[i]);
    }
    compute(ctx, ours);

    // The same with the tensor of the program, as it computes without post-fetch.
    struct ggml_tensor * expected = ggml_mul_mat_id(ctx, layer->down, both, ids);
    struct ggml_cgraph * theirs   = ggml_new_graph(ctx);
    ggml_build_forward_expand(theirs, expected);
    compute(ctx, theirs);
    for (size_t i = 0; i < n_products; i++) {
        const float * sum = products[i]->data;
        const char *  same = (const char *) expected->data + i * expected->nb[1];
        figures->different += memcmp(sum, same, (size_t) n * sizeof(float)) != 0;
        for (int64_t j = 0; j < n; j++) {
            hidden[(int64_t) (i / (size_t) n_used) * n + j] += sum[j] / (float) n_used;
        }
    }
    // After the last product that reads them: the memory is for the next layer.
    OK(llama_postfetch_release_layer(postfetch, layer->number));
    free(products);
    ggml_free(ctx);
}

int main(int argc, char ** argv) {
    CHECK(argc == 2 || argc == 3);
    const int64_t            n_tokens  = argc == 3 ? atoi(argv[2]) : 1;
    CHECK(n_tokens > 0);
    // The program loads its model itself.
    struct ggml_context * weights = NULL;
    struct gguf_context * file    = gguf_init_from_file(argv[1], (struct gguf_init_params) {false, &weights});
    CHECK(file != NULL);
    const int64_t n_used = experts_used(file);

    struct llama_model * model = model_of(weights);
    CHECK(model != NULL);
    struct llama_postfetch_params params;
    params.struct_size = sizeof(params);
    OK(llama_postfetch_default_params(&params));
    params.n_active = (uint32_t) n_used;
    struct llama_postfetch * postfetch = llama_postfetch_init(model, &params);
    CHECK(postfetch != NULL);

    // The hidden state is that of the embedding of some tokens.
    struct ggml_context * ctx       = new_context(ACTIVATIONS);
    struct ggml_tensor *  embedding = ggml_get_tensor(weights, "token_embd.weight");
    CHECK(embedding != NULL);
    struct ggml_tensor * tokens = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_tokens);
    for (int64_t token = 0; token < n_tokens; token++) {
        ((int32_t *) tokens->data)[token] = (int32_t) ((100 + 7 * token) % embedding->ne[1]);
    }
    struct ggml_tensor * hidden = ggml_get_rows(ctx, embedding, tokens);
    struct ggml_cgraph * begin  = ggml_new_graph(ctx);
    ggml_build_forward_expand(begin, hidden);
    compute(ctx, begin);

    struct figures figures = {0, 0, 0};
    struct layer   layer;
    for (int block = 0; find_layer(weights, postfetch, block, &layer); block++) {
        run_layer(postfetch, &layer, hidden->data, n_tokens, n_used, &figures);
    }
    char text[4096];
    CHECK(llama_postfetch_describe(postfetch, true, text, sizeof(text)) < sizeof(text));
    printf("%s\n", text);
    printf("%llu products with experts from the device, %llu from host memory: %llu differ from those of the program's own tensors\n",
           (unsigned long long) figures.from_device, (unsigned long long) figures.from_host,
           (unsigned long long) figures.different);
    OK(llama_postfetch_free(postfetch));
    OK(llama_sidecar_model_free(model));
    // After the library has read them for the last time.
    ggml_free(ctx);
    ggml_free(weights);
    gguf_free(file);
    return figures.different == 0 && figures.from_device + figures.from_host > 0 ? 0 : 1;
}
