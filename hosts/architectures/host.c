// A host without a reference to llama-sidecar, for models of any architecture: C, linked with libllama.
//
// Takes commands on standard input and answers each with one line:
//
//   load MODEL  frees the model before and loads another one: `loaded`, or `failed`
//   evaluate    evaluates fixed tokens from an empty memory: a hash of the logits of all tokens,
//               and how many of them are no numbers; `failed` with the step and its code
//   evaluate FILE  the same, and writes the logits to a file
//   counts      with HOST_COUNT: how often each expert was used since the model was loaded, by the
//               callback that llama.cpp has for looking at an evaluation; JSON
//   scores      with HOST_COUNT: the operation that makes scores of the router's product: `none`,
//               SOFT_MAX, SIGMOID, or another name of ggml's
//   graph FILE  with HOST_COUNT: writes each node of the next evaluations to a file, and before it its
//               sources: address, operation, name and addresses of sources, with tabs between them: `writes`
//   end         ends the process
//
// HOST_EXPERTS_ON_CPU keeps routed experts in host memory, as llama.cpp's flag -cmoe does.
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// From llama.h and ggml.h, as far as they are used. Parameters are passed and returned by value;
// these are larger than the library's structs, which read and write only their own part.
struct params {
    uint32_t words[128];
};
struct llama_batch {
    int32_t n_tokens;
    int32_t * token;
    float * embd;
    int32_t * pos;
    int32_t * n_seq_id;
    int32_t ** seq_id;
    int8_t * logits;
};
struct llama_model_tensor_buft_override {
    const char * pattern;
    void * buffer_type;
};
struct llama_model;
struct llama_context;
struct llama_vocab;
struct llama_memory_i;
struct ggml_tensor;

struct params llama_model_default_params(void);
struct params llama_context_default_params(void);
struct llama_model * llama_model_load_from_file(const char * path, struct params params);
struct llama_context * llama_init_from_model(struct llama_model * model, struct params params);
const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
int32_t llama_vocab_n_tokens(const struct llama_vocab * vocab);
bool llama_model_has_encoder(const struct llama_model * model);
int32_t llama_encode(struct llama_context * context, struct llama_batch batch);
int32_t llama_decode(struct llama_context * context, struct llama_batch batch);
float * llama_get_logits_ith(struct llama_context * context, int32_t i);
struct llama_memory_i * llama_get_memory(const struct llama_context * context);
void llama_memory_clear(struct llama_memory_i * memory, bool data);
void llama_free(struct llama_context * context);
void llama_model_free(struct llama_model * model);
void llama_log_set(void (*callback)(int, const char *, void *), void * user_data);
void ggml_backend_load_all(void);
void * ggml_backend_cpu_buffer_type(void);
const char * ggml_get_name(const struct ggml_tensor * tensor);
const char * ggml_op_desc(const struct ggml_tensor * tensor);
void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);

#define MOST_TOKENS 40
#define MOST_SOURCES 10
#define MOST_LAYERS 64
#define MOST_EXPERTS 256

static struct llama_model * model;
static struct llama_context * context;
static uint64_t counts[MOST_LAYERS][MOST_EXPERTS];
// Layers of the present evaluation whose experts are counted: grovemoe selects them once more, for
// the smaller experts beside them.
static bool counted[MOST_LAYERS];
static char scores[32] = "none";
static FILE * graph;

static void quiet(int level, const char * text, void * user_data) {
    (void) level, (void) text, (void) user_data;
}

static void write_tensor(const struct ggml_tensor * tensor, bool is_node) {
    // The place in struct ggml_tensor, as in hosts/python/host.py.
    const struct ggml_tensor * const * sources = (const void *) ((const char *) tensor + 152);
    for (int at = 0; is_node && at < MOST_SOURCES; at++) {
        if (sources[at]) {
            write_tensor(sources[at], false);
        }
    }
    fprintf(graph, "%p\t%s\t%s", (const void *) tensor, ggml_op_desc(tensor), ggml_get_name(tensor));
    for (int at = 0; at < MOST_SOURCES; at++) {
        if (sources[at]) {
            fprintf(graph, "\t%p", (const void *) sources[at]);
        }
    }
    fputc('\n', graph);
}

// Counts the experts of a layer. llama.cpp calls it before each node, whether the node is of
// interest, and after those that are.
static bool count_experts(struct ggml_tensor * tensor, bool ask, void * user_data) {
    (void) user_data;
    static const char topk[] = "ffn_moe_topk-";
    static const char probs[] = "ffn_moe_probs-";
    const char * name = ggml_get_name(tensor);
    if (ask && graph) {
        write_tensor(tensor, true);
    }
    // Views of the tensor have longer names.
    if (strncmp(name, probs, strlen(probs)) == 0 && !strchr(name, ' ')) {
        snprintf(scores, sizeof(scores), "%s", ggml_op_desc(tensor));
    }
    if (strncmp(name, topk, strlen(topk)) != 0) {
        return !ask;
    }
    if (ask) {
        return true;
    }
    // Places in struct ggml_tensor, as in hosts/python/host.py.
    const int64_t * ne = (const int64_t *) ((const char *) tensor + 16);
    const size_t * nb = (const size_t *) ((const char *) tensor + 48);
    const int layer = atoi(name + strlen(topk));
    if (layer < 0 || layer >= MOST_LAYERS || counted[layer]) {
        return true;
    }
    counted[layer] = true;
    for (int64_t at = 0; at < ne[0] * ne[1]; at++) {
        int32_t expert;
        const size_t offset = (size_t) (at / ne[0]) * nb[1] + (size_t) (at % ne[0]) * nb[0];
        ggml_backend_tensor_get(tensor, &expert, offset, sizeof(expert));
        if (expert >= 0 && expert < MOST_EXPERTS) {
            counts[layer][expert]++;
        }
    }
    return true;
}

static void write_counts(void) {
    putchar('{');
    const char * between = "";
    for (int layer = 0; layer < MOST_LAYERS; layer++) {
        for (int expert = 0; expert < MOST_EXPERTS; expert++) {
            if (counts[layer][expert]) {
                printf("%s\"%d,%d\":%" PRIu64, between, layer, expert, counts[layer][expert]);
                between = ",";
            }
        }
    }
    puts("}");
}

static void unload(void) {
    if (context) {
        llama_free(context);
    }
    if (model) {
        llama_model_free(model);
    }
    context = NULL;
    model = NULL;
    memset(counts, 0, sizeof(counts));
}

static bool load(const char * path) {
    unload();
    struct params params = llama_model_default_params();
    static struct llama_model_tensor_buft_override overrides[2];
    if (getenv("HOST_EXPERTS_ON_CPU")) {
        overrides[0].pattern = "\\.ffn_(up|down|gate|gate_up)_(ch|)exps";
        overrides[0].buffer_type = ggml_backend_cpu_buffer_type();
        const void * address = overrides;
        memcpy(&params.words[2], &address, sizeof(address)); // tensor_buft_overrides
    }
    model = llama_model_load_from_file(path, params);
    if (!model) {
        return false;
    }
    params = llama_context_default_params();
    if (params.words[0] != 512 || params.words[7] != 4 || params.words[8] != 4) {
        fprintf(stderr, "another version of llama.cpp\n");
        exit(1);
    }
    // n_ctx, n_batch, n_ubatch
    params.words[0] = 256;
    params.words[1] = params.words[2] = 64;
    params.words[7] = params.words[8] = 1; // n_threads, n_threads_batch
    if (getenv("HOST_COUNT")) {
        bool (*callback)(struct ggml_tensor *, bool, void *) = count_experts;
        memcpy(&params.words[22], &callback, sizeof(callback)); // cb_eval
    }
    context = llama_init_from_model(model, params);
    return context != NULL;
}

// Evaluates tokens, adds their logits to the hash, and writes them to a file, if there is one. Returns the code of libllama.
static int32_t evaluate(int32_t first, int32_t n_tokens, uint64_t * hash, int * not_numbers, FILE * file) {
    const int32_t size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    int32_t tokens[MOST_TOKENS];
    int8_t outputs[MOST_TOKENS];
    for (int32_t i = 0; i < n_tokens; i++) {
        tokens[i] = (first + i) * 37 % (size < 128 ? size : 128);
        outputs[i] = 1;
    }
    struct llama_batch batch = {.n_tokens = n_tokens, .token = tokens, .logits = outputs};
    memset(counted, 0, sizeof(counted));
    int32_t code = llama_model_has_encoder(model) ? llama_encode(context, batch) : 0;
    code = code ? code : llama_decode(context, batch);
    for (int32_t i = 0; !code && i < n_tokens; i++) {
        const float * logits = llama_get_logits_ith(context, i);
        if (file) {
            fwrite(logits, sizeof(*logits), (size_t) size, file);
        }
        for (int32_t token = 0; token < size; token++) {
            uint32_t bits;
            memcpy(&bits, &logits[token], sizeof(bits));
            *hash = (*hash ^ bits) * 0x100000001b3; // FNV-1a, by words
            *not_numbers += logits[token] != logits[token];
        }
    }
    return code;
}

// The last evaluation has the shape of the first one, whose graph libllama then uses again.
static void evaluate_all(const char * path) {
    static const int32_t steps[] = {1, 1, 12, 36, 1, 1};
    uint64_t hash = 0xcbf29ce484222325;
    int not_numbers = 0;
    struct llama_memory_i * memory = llama_get_memory(context);
    if (memory) {
        llama_memory_clear(memory, true);
    }
    FILE * file = path ? fopen(path, "wb") : NULL;
    if (path && !file) {
        perror(path);
        exit(1);
    }
    int32_t next = 0, code = 0;
    size_t step = 0;
    for (; step < sizeof(steps) / sizeof(*steps); step++) {
        code = evaluate(next, steps[step], &hash, &not_numbers, file);
        if (code) {
            break;
        }
        next += steps[step];
    }
    // The answer comes when the file is complete.
    if (file && fclose(file) != 0) {
        perror(path);
        exit(1);
    }
    if (code) {
        printf("failed %zu %d\n", step, code);
    } else {
        printf("%016" PRIx64 " %d\n", hash, not_numbers);
    }
}

int main(void) {
    llama_log_set(quiet, NULL);
    ggml_backend_load_all();
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    char line[4096];
    while (fgets(line, sizeof(line), stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, "load ", 5) == 0) {
            puts(load(line + 5) ? "loaded" : "failed");
        } else if (strcmp(line, "evaluate") == 0) {
            evaluate_all(NULL);
        } else if (strncmp(line, "evaluate ", 9) == 0) {
            evaluate_all(line + 9);
        } else if (strncmp(line, "graph ", 6) == 0 && (graph = fopen(line + 6, "w"))) {
            puts("writes");
        } else if (strcmp(line, "scores") == 0) {
            puts(scores);
        } else if (strcmp(line, "counts") == 0) {
            write_counts();
        } else {
            break;
        }
    }
    unload();
    return 0;
}
