// A library that has nothing to do with llama.cpp and exports functions of the same
// names, with other arguments and results.
#include <stdarg.h>

double gguf_init_from_file(double a, double b, int c) { return a * b + c; }

long ggml_free(long a, long b, long c, long d, long e, long f, long g) {
    return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g;
}

int ggml_backend_sched_graph_compute_async(const char * format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int sum = 0;
    for (; *format; format++) {
        sum += *format == 'd' ? va_arg(arguments, int) : (int) va_arg(arguments, double);
    }
    va_end(arguments);
    return sum;
}

struct big {
    long values[9];
};
struct big ggml_backend_buffer_free(struct big value, float factor) {
    for (int i = 0; i < 9; i++) {
        value.values[i] = (long) ((float) value.values[i] * factor);
    }
    return value;
}
