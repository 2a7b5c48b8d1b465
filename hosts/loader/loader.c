// Loads libraries in the ways that the dynamic loader knows, and prints what the
// functions in them return. Each argument is a step:
//
//   local=FILE, global=FILE, deep=FILE   loads it: RTLD_LOCAL, RTLD_GLOBAL, RTLD_DEEPBIND
//   call=N:FUNCTION                      calls a function of the Nth library
//   again                                calls that function again
//   close=N                              unloads the Nth library
//   self                                 calls ggml_backend_buffer_free from here
//   next                                 calls what dlsym(RTLD_NEXT) gives here
//   weak                                 calls ggml_free if there is one
//   error                                prints whether dlerror() has something to say
//   wait                                 waits until it is ended
//   errno=N, errno                       sets errno, prints it
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int ggml_free(void * context) __attribute__((weak));
int ggml_backend_buffer_free(void * buffer) __attribute__((weak));

#ifdef WRAPS
// A function of this program in front of the library's.
int ggml_backend_buffer_free(void * buffer) {
    int (*next)(void *) = (int (*)(void *)) dlsym(RTLD_NEXT, "ggml_backend_buffer_free");
    return 100 + (next ? next(buffer) : 0);
}
#endif

static void * loaded[16];
static int count;
static int (*function)(void);

static void load(const char * path, int flags) {
    loaded[count] = dlopen(path, flags);
    if (!loaded[count]) {
        printf("not loaded\n");
    }
    count++;
}

int main(int argc, char ** argv) {
    // A test must end.
    alarm(20);
    for (int i = 1; i < argc; i++) {
        char * step = argv[i];
        char * value = strchr(step, '=');
        value = value ? value + 1 : step;
        char * name = strchr(value, ':');
        if (strncmp(step, "local=", 6) == 0) {
            load(value, RTLD_LAZY | RTLD_LOCAL);
        } else if (strncmp(step, "global=", 7) == 0) {
            load(value, RTLD_LAZY | RTLD_GLOBAL);
        } else if (strncmp(step, "deep=", 5) == 0) {
            load(value, RTLD_LAZY | RTLD_LOCAL | RTLD_DEEPBIND);
        } else if (strncmp(step, "call=", 5) == 0) {
            function = (int (*)(void)) dlsym(loaded[atoi(value)], name + 1);
            printf("%d\n", function ? function() : -2);
        } else if (strcmp(step, "again") == 0) {
            printf("%d\n", function());
        } else if (strncmp(step, "close=", 6) == 0) {
            dlclose(loaded[atoi(value)]);
        } else if (strcmp(step, "self") == 0) {
            printf("%d\n", ggml_backend_buffer_free(NULL));
        } else if (strcmp(step, "next") == 0) {
            int (*next)(void *) = (int (*)(void *)) dlsym(RTLD_NEXT, "ggml_backend_buffer_free");
            printf("%d\n", next ? next(NULL) : 0);
        } else if (strcmp(step, "weak") == 0) {
            printf("%d\n", ggml_free ? ggml_free(NULL) : 0);
        } else if (strcmp(step, "error") == 0) {
            printf("%s\n", dlerror() ? "an error" : "no error");
        } else if (strcmp(step, "errno") == 0) {
            printf("%d\n", errno);
        } else if (strcmp(step, "wait") == 0) {
            pause();
        } else if (strncmp(step, "errno=", 6) == 0) {
            errno = atoi(value);
        } else {
            return 2;
        }
        fflush(stdout);
    }
    return 0;
}
