// Sends the first thread a signal in some calls of mremap, and forks in its handler: loaded beside a program, for tests.
// The number of forks is in the file that SIGNALLED_COUNT names.
#define _GNU_SOURCE
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static unsigned calls, forks;

static void on_signal(int number) {
    (void) number;
    const pid_t child = fork();
    if (child == 0) {
        _exit(0);
    }
    waitpid(child, NULL, 0);
    forks++;
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &action, NULL);
}

__attribute__((destructor)) static void end(void) {
    const char * path = getenv("SIGNALLED_COUNT");
    FILE *       file = path ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "%u", forks);
        fclose(file);
    }
}

void * mremap(void * old, size_t old_size, size_t size, int flags, ...) {
    va_list more;
    va_start(more, flags);
    void * to = flags & MREMAP_FIXED ? va_arg(more, void *) : NULL;
    va_end(more);
    // Threads of the drop-in handle no signal. Not for each call: after a fork, what is in memory is mapped again.
    if (gettid() == getpid() && calls++ % 16 == 1) {
        raise(SIGUSR1);
    }
    return (void *) syscall(SYS_mremap, old, old_size, size, flags, to);
}
