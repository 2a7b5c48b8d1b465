// Closes all descriptors from 3 on with SIGUSR2, as closefrom does: loaded beside a program, for tests.
#define _GNU_SOURCE
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

static void close_all(int signal) {
    (void) signal;
    syscall(SYS_close_range, 3u, ~0u, 0u);
}

__attribute__((constructor)) static void start(void) {
    signal(SIGUSR2, close_all);
}
