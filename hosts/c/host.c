// A host without a reference to llama-sidecar: C, linked with libllama.
//
//   host LIBRARIES MODEL
//
// Takes the same commands on standard input as hosts/node/host.mjs, and two more: `reload`
// calls llama_reload_changed_tensors where a library has it, as programs made for
// ik_llama.cpp do; `warmup` evaluates the prompt in the warm-up mode of llama.cpp.
// HOST_THREADS sets the number of threads, 1 by default.
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// From llama.h, as far as it is used. Parameters are passed and returned by value;
// these are larger than the library's structs, which read and write only their own
// part.
struct params {
    uint32_t words[128];
};
struct llama_batch {
    int32_t n_tokens;
    void * arrays[6];
};
struct llama_model;
struct llama_context;
struct llama_vocab;
struct llama_memory_i;

struct params llama_model_default_params(void);
struct params llama_context_default_params(void);
struct llama_model * llama_model_load_from_file(const char * path, struct params params);
struct llama_context * llama_init_from_model(struct llama_model * model, struct params params);
const struct llama_vocab * llama_model_get_vocab(const struct llama_model * model);
int32_t llama_vocab_n_tokens(const struct llama_vocab * vocab);
int32_t llama_tokenize(const struct llama_vocab * vocab, const char * text, int32_t text_len,
                       int32_t * tokens, int32_t n_tokens_max, bool add_special,
                       bool parse_special);
struct llama_batch llama_batch_get_one(int32_t * tokens, int32_t n_tokens);
int32_t llama_decode(struct llama_context * context, struct llama_batch batch);
float * llama_get_logits_ith(struct llama_context * context, int32_t i);
struct llama_memory_i * llama_get_memory(const struct llama_context * context);
void llama_memory_clear(struct llama_memory_i * memory, bool data);
void llama_free(struct llama_context * context);
void llama_model_free(struct llama_model * model);
void llama_log_set(void (*callback)(int, const char *, void *), void * user_data);
void ggml_backend_load_all_from_path(const char * path);

// ik_llama.cpp has this function; a program may look it up without needing it.
bool llama_reload_changed_tensors(struct llama_context * context) __attribute__((weak));
// Later versions of llama.cpp may lack this one.
void llama_set_warmup(struct llama_context * context, bool warmup) __attribute__((weak));

static struct llama_model * model;
static struct llama_context * context;
static int32_t last;

static void quiet(int level, const char * text, void * user_data) {
    (void) level, (void) text, (void) user_data;
}

static void load(const char * path) {
    model = llama_model_load_from_file(path, llama_model_default_params());
    struct params params = llama_context_default_params();
    if (!model || params.words[0] != 512 || params.words[7] != 4 || params.words[8] != 4) {
        fprintf(stderr, "cannot load %s, or another version of llama.cpp\n", path);
        exit(1);
    }
    // Threads of ggml spin while they wait: several of them are slow on busy cores.
    const char * threads = getenv("HOST_THREADS");
    params.words[0] = 256; // n_ctx
    params.words[7] = params.words[8] = threads ? (uint32_t) atoi(threads) : 1; // n_threads, n_threads_batch
    context = llama_init_from_model(model, params);
}

// Reads the tokens and writes `count` more, each the most likely one.
static void write_tokens(int32_t * tokens, int32_t n_tokens, int count) {
    const int32_t size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int i = 0; i < count; i++) {
        if (llama_decode(context, llama_batch_get_one(tokens, n_tokens)) != 0) {
            fprintf(stderr, "llama_decode failed\n");
            exit(1);
        }
        const float * logits = llama_get_logits_ith(context, -1);
        last = 0;
        for (int32_t token = 1; token < size; token++) {
            if (logits[token] > logits[last]) {
                last = token;
            }
        }
        printf("%s%d", i ? " " : "", last);
        tokens = &last;
        n_tokens = 1;
    }
    printf("\n");
}

// Forgets everything, reads the prompt and writes `count` tokens.
static void write_text(int count) {
    static const char prompt[] = "The capital of France is";
    int32_t tokens[64];
    const int32_t n_tokens = llama_tokenize(llama_model_get_vocab(model), prompt,
                                            (int32_t) strlen(prompt), tokens, 64, false, false);
    llama_memory_clear(llama_get_memory(context), true);
    write_tokens(tokens, n_tokens, count);
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: host LIBRARIES MODEL\n");
        return 2;
    }
    llama_log_set(quiet, NULL);
    ggml_backend_load_all_from_path(argv[1]);
    load(argv[2]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    char line[4096];
    while (fgets(line, sizeof(line), stdin)) {
        line[strcspn(line, "\n")] = 0;
        char * argument = strchr(line, ' ');
        if (argument) {
            *argument++ = 0;
        }
        if (strcmp(line, "text") == 0) {
            write_text(atoi(argument));
        } else if (strcmp(line, "warmup") == 0 && llama_set_warmup) {
            llama_set_warmup(context, true);
            write_text(1);
            llama_set_warmup(context, false);
        } else if (strcmp(line, "more") == 0) {
            int32_t token = last;
            write_tokens(&token, 1, atoi(argument));
        } else if (strcmp(line, "reload") == 0) {
            puts(llama_reload_changed_tensors == NULL           ? "no such function"
                 : llama_reload_changed_tensors(context) ? "changed"
                                                                : "unchanged");
        } else if (strcmp(line, "free") == 0) {
            llama_free(context);
            llama_model_free(model);
            puts("freed");
        } else if (strcmp(line, "load") == 0) {
            load(argument);
            puts("loaded");
        } else {
            break;
        }
    }
    return 0;
}
