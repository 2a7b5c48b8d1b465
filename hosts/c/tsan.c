// What code compiled by LLVM asks of ThreadSanitizer and gcc's does not have. The functions of
// the C library do the same, and are watched.
#include <stddef.h>
#include <string.h>

void * __tsan_memcpy(void * to, const void * from, size_t size);
void * __tsan_memmove(void * to, const void * from, size_t size);
void * __tsan_memset(void * to, int value, size_t size);

void * __tsan_memcpy(void * to, const void * from, size_t size) {
    return memcpy(to, from, size);
}

void * __tsan_memmove(void * to, const void * from, size_t size) {
    return memmove(to, from, size);
}

void * __tsan_memset(void * to, int value, size_t size) {
    return memset(to, value, size);
}
