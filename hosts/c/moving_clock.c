// A clock of the world that moves back and forth by up to a year, a clock of the machine that leaps
// forward, as after a suspend: loaded beside a program, for tests.
#define _GNU_SOURCE
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define YEAR (365 * 24 * 3600)

int clock_gettime(clockid_t clock, struct timespec * now) {
    static atomic_uint calls;
    const int          failed = (int) syscall(SYS_clock_gettime, clock, now);
    const unsigned     call   = atomic_fetch_add(&calls, 1);
    switch (clock) {
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE:
        now->tv_sec += (time_t) (call * 2654435761u % (2 * YEAR)) - YEAR;
        break;
    case CLOCK_MONOTONIC:
        now->tv_sec += (time_t) (call / 64) * 60;
        break;
    default:
        break;
    }
    return failed;
}
