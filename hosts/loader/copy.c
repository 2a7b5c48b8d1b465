// A copy of a library with a function of ggml's: it answers with the number of the copy.
#include <stdio.h>

// A buffer as ggml makes them: its first field leads into the library that made it.
struct buffer {
    int (*copy)(void);
};

static int copy(void) { return COPY; }
static struct buffer mine = {copy};

int ggml_backend_buffer_free(struct buffer * buffer);

#ifdef TWO_VERSIONS
// Version 1 is what programs got that were linked with an older release.
int first(struct buffer * buffer) { return buffer ? -1 : COPY; }
int second(struct buffer * buffer) { return buffer ? -1 : COPY + 1; }
__asm__(".symver first, ggml_backend_buffer_free@FIRST");
__asm__(".symver second, ggml_backend_buffer_free@@SECOND");
#else
// -1 for the buffer of another copy.
int ggml_backend_buffer_free(struct buffer * buffer) {
    return buffer && buffer->copy != copy ? -1 : COPY;
}
#endif

// Both end with a jump: the called function returns to the caller of these.
int jump(void) { return ggml_backend_buffer_free(NULL); }
int jump_with_buffer(void) { return ggml_backend_buffer_free(&mine); }

__attribute__((destructor)) static void unloaded(void) {
    printf("copy %d unloaded\n", COPY);
    fflush(stdout);
}
