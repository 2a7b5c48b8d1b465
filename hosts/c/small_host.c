// Drives the stand-in for libllama, with commands on standard input.
//
//   small_host LIBRARIES MODEL [no-reserve]
//
//   decode [STALL_MS]   evaluates and prints the sum of the results, or "failed STATUS"
//   begin               evaluates without waiting for the results, and prints "begun"
//   aborted             evaluates once with an abort callback that returns true
//   throw               evaluates once, while a callback of ggml throws a C++ exception, and
//                       prints "thrown"
//   inspect FILE        opens a file for its metadata many times, and prints how many
//                       descriptors are open more than before
//   derive NAME         lets the next graphs read a weight of this name that is from no file
//   two HOW FIRST SECOND
//                       loads two further models at once, mapped, read or by-opener, and
//                       prints "loaded"
//   use NUMBER          evaluates the first or second of them from now on, and prints "used"
//   free                frees everything, the graph first
//
// With HOST_WORKER in the environment, a forked child does this, as in servers whose workers load
// the model.
#define _DEFAULT_SOURCE
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "small_llama.h"

void ggml_backend_load_all_from_path(const char * path);
// In throws.cpp.
void small_throw(void);

static void print(float sum, int status) {
    if (status == 0) {
        printf("%g\n", (double) sum);
    } else {
        printf("failed %d\n", status);
    }
}

static void load_two(char * line) {
    static const char * const hows[] = {"mapped", "read", "by-opener"};
    const char * how = strtok(line, " ");
    // They are kept: a model is read again when it is swapped.
    const char * first = strdup(strtok(NULL, " "));
    const char * second = strdup(strtok(NULL, " "));
    for (int i = 0; i < 3; i++) {
        if (strcmp(how, hows[i]) == 0) {
            small_load_two(first, second, (enum placement) i);
        }
    }
}

static int descriptors(void) {
    DIR * folder = opendir("/proc/self/fd");
    int count = 0;
    while (folder && readdir(folder)) {
        count++;
    }
    closedir(folder);
    return count;
}

int main(int argc, char ** argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: small_host LIBRARIES MODEL [no-reserve]\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    ggml_backend_load_all_from_path(argv[1]);
    const pid_t worker = getenv("HOST_WORKER") ? fork() : 0;
    if (worker != 0) {
        int status = 0;
        waitpid(worker, &status, 0);
        return WEXITSTATUS(status);
    }
    small_load(argv[2], argc == 3);
    puts("ready");
    char line[4096];
    while (fgets(line, sizeof(line), stdin)) {
        line[strcspn(line, "\n")] = 0;
        int status = 0;
        if (strncmp(line, "decode", 6) == 0) {
            const float sum = llama_decode(atoi(line + 6), true, &status);
            print(sum, status);
        } else if (strcmp(line, "begin") == 0) {
            llama_decode(0, false, &status);
            puts("begun");
        } else if (strcmp(line, "aborted") == 0) {
            small_abort(true);
            const float sum = llama_decode(0, true, &status);
            small_abort(false);
            print(sum, status);
        } else if (strcmp(line, "throw") == 0) {
            small_throw();
            puts("thrown");
        } else if (strncmp(line, "inspect ", 8) == 0) {
            const int before = descriptors();
            small_inspect(line + 8, 50);
            printf("%d\n", descriptors() - before);
        } else if (strncmp(line, "derive ", 7) == 0) {
            small_derive(line + 7);
            puts("derived");
        } else if (strncmp(line, "two ", 4) == 0) {
            load_two(line + 4);
            puts("loaded");
        } else if (strncmp(line, "use ", 4) == 0) {
            small_use(atoi(line + 4));
            puts("used");
        } else if (strcmp(line, "free") == 0) {
            small_free();
            puts("freed");
        } else {
            break;
        }
    }
    return 0;
}
