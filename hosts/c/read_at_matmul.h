// Reads the experts of one matrix when its multiplication begins, as ik_llama.cpp does with
// --prefetch-experts: threads find out which pages are missing (mincore), and read those of 2 MB
// at a time into memory that is not used (pread), so that the page cache has them.
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct ggml_tensor;
const char * ggml_get_name(const struct ggml_tensor * tensor);

enum { READERS = 8, JOBS = 1 << 14, PAGE = 4096, CHUNK = 2 << 20 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t more;
    // Ranges of the mapping; the oldest is dropped when there are too many.
    uintptr_t ranges[JOBS][2];
    uint64_t first, last;
    // The file, and what an address in the mapping exceeds its offset in the file by.
    int file;
    uintptr_t base;
} reads = {.lock = PTHREAD_MUTEX_INITIALIZER, .more = PTHREAD_COND_INITIALIZER, .base = 0};

static void * read_ranges(void * unused) {
    (void) unused;
    static _Thread_local unsigned char missing[CHUNK / PAGE + 1];
    char * scratch = malloc(CHUNK + PAGE);
    for (;;) {
        pthread_mutex_lock(&reads.lock);
        while (reads.first == reads.last) {
            pthread_cond_wait(&reads.more, &reads.lock);
        }
        const uintptr_t * range = reads.ranges[reads.first++ % JOBS];
        const uintptr_t start = range[0], end = range[1];
        pthread_mutex_unlock(&reads.lock);
        if (mincore((void *) start, end - start, missing) != 0) {
            continue;
        }
        const size_t pages = (end - start) / PAGE;
        for (size_t at = 0, to; at < pages; at = to) {
            for (to = at + 1; to < pages && (missing[to] & 1) == (missing[at] & 1);) {
                to++;
            }
            if (!(missing[at] & 1)) {
                const off_t offset = (off_t) (start + at * PAGE - reads.base);
                if (pread(reads.file, scratch, (to - at) * PAGE, offset) < 0) {
                    break;
                }
            }
        }
    }
    return NULL;
}

// Opens the file of a mapping and starts the threads.
static void start_reading(uintptr_t address) {
    FILE * maps = fopen("/proc/self/maps", "r");
    char line[4096 + 128], path[4096];
    while (maps && fgets(line, sizeof(line), maps)) {
        uintptr_t from, to;
        uint64_t offset;
        if (sscanf(line, "%lx-%lx %*s %lx %*s %*s %4095[^\n]", &from, &to, &offset, path) == 4
            && from <= address && address < to) {
            reads.base = from - offset;
            reads.file = open(path, O_RDONLY);
            break;
        }
    }
    if (maps) {
        fclose(maps);
    }
    if (!reads.base || reads.file < 0) {
        fprintf(stderr, "the experts are not in a mapped file\n");
        exit(1);
    }
    for (int i = 0; i < READERS; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, read_ranges, NULL);
    }
}

static void request(uintptr_t start, size_t bytes) {
    const uintptr_t end = (start + bytes + PAGE - 1) / PAGE * PAGE;
    for (start = start / PAGE * PAGE; start < end; start += CHUNK) {
        uintptr_t * range = reads.ranges[reads.last % JOBS];
        range[0] = start;
        range[1] = end - start < CHUNK ? end : start + CHUNK;
        reads.first += ++reads.last - reads.first > JOBS;
    }
}

// llama.cpp calls it before each node, whether the node is of interest, and after those that are.
// Each multiplication becomes a part of its own, after the part that computes the ids.
static bool read_at_matmul(struct ggml_tensor * tensor, bool ask, void * user_data) {
    (void) user_data;
    const char * name = ggml_get_name(tensor);
    const bool is_matmul = strncmp(name, "ffn_moe_gate-", 13) == 0
        || strncmp(name, "ffn_moe_up-", 11) == 0 || strncmp(name, "ffn_moe_down-", 13) == 0;
    if (!is_matmul || !ask) {
        return !ask || strncmp(name, "ffn_moe_topk-", 13) == 0;
    }
    // Places in struct ggml_tensor, as in hosts/python/host.py.
    char * const * src = (char * const *) ((const char *) tensor + 152);
    const char * weight = src[0], * ids = src[2];
    if (!weight || !ids) {
        return false;
    }
    const int64_t * ne = (const int64_t *) (ids + 16);
    const size_t * nb = (const size_t *) (ids + 48);
    const char * data = *(char * const *) (ids + 248);
    const uintptr_t experts = *(const uintptr_t *) (weight + 248);
    const int64_t n_experts = ((const int64_t *) (weight + 16))[2];
    const size_t bytes = ((const size_t *) (weight + 48))[2];
    static bool wanted[4096];
    memset(wanted, 0, sizeof(wanted));
    if (!reads.base) {
        start_reading(experts);
    }
    pthread_mutex_lock(&reads.lock);
    for (int64_t token = 0; token < ne[1]; token++) {
        for (int64_t place = 0; place < ne[0]; place++) {
            const int32_t expert = *(const int32_t *) (data + token * nb[1] + place * nb[0]);
            if (expert < 0 || expert >= n_experts || expert >= 4096 || wanted[expert]) {
                continue;
            }
            wanted[expert] = true;
            request(experts + (size_t) expert * bytes, bytes);
        }
    }
    pthread_cond_broadcast(&reads.more);
    pthread_mutex_unlock(&reads.lock);
    return true;
}
