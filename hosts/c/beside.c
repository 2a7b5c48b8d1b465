// Opens the library BESIDE with local scope before the program begins, as another module of a program does: loaded beside a
// program, for tests.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

__attribute__((constructor)) static void start(void) {
    const char * path = getenv("BESIDE");
    if (path != NULL && dlopen(path, RTLD_NOW | RTLD_LOCAL) == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
}
