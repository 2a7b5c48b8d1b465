// Calls the functions of fake_ggml.c and prints what it gets.
#include <stdio.h>
#include <stdlib.h>

struct big {
    long values[9];
};
double gguf_init_from_file(double a, double b, int c);
long ggml_free(long a, long b, long c, long d, long e, long f, long g);
int ggml_backend_sched_graph_compute_async(const char * format, ...);
struct big ggml_backend_buffer_free(struct big value, float factor);

int main(int argc, char ** argv) {
    printf("%g\n", gguf_init_from_file(2.5, 4.0, 3));
    printf("%ld\n", ggml_free(1, 2, 3, 4, 5, 6, 7));
    printf("%d\n", ggml_backend_sched_graph_compute_async("dfdf", 1, 2.0, 3, 4.0));
    const struct big value = {{1, 2, 3, 4, 5, 6, 7, 8, 9}};
    printf("%ld\n", ggml_backend_buffer_free(value, 2.0f).values[8]);
    return argc > 1 ? atoi(argv[1]) : 0;
}
