// A plugin that calls a function of ggml's.
#ifdef OLD
__asm__(".symver ggml_backend_buffer_free, ggml_backend_buffer_free@FIRST");
#endif
int ggml_backend_buffer_free(void * buffer);

int go(void) {
    volatile int result = ggml_backend_buffer_free(0);
    return result;
}

#ifdef ON_LOAD
// Calls it in another thread while the loader runs this constructor.
#include <pthread.h>
static void * call(void * unused) {
    go();
    return unused;
}
__attribute__((constructor)) static void loaded(void) {
    pthread_t thread;
    if (pthread_create(&thread, 0, call, 0) == 0) {
        pthread_join(thread, 0);
    }
}
#endif
