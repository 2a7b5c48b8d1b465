// Counts the allocations of the drop-in in a process, loaded after it. At the end of the process, a line
// in the file that ALLOCATIONS names has their number and the program, if there are any.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// What the C library's functions call.
void * __libc_malloc(size_t size);
void * __libc_calloc(size_t count, size_t size);
void * __libc_realloc(void * memory, size_t size);

static uintptr_t    first, last;
static atomic_ulong count;

static int find(struct dl_phdr_info * object, size_t size, void * data) {
    (void) size;
    (void) data;
    if (strstr(object->dlpi_name, "libllama_sidecar_preload")) {
        for (int i = 0; i < object->dlpi_phnum; i++) {
            const ElfW(Phdr) * part = &object->dlpi_phdr[i];
            if (part->p_type == PT_LOAD && (part->p_flags & PF_X)) {
                first = object->dlpi_addr + part->p_vaddr;
                last  = first + part->p_memsz;
            }
        }
    }
    return 0;
}

__attribute__((constructor)) static void begin(void) {
    dl_iterate_phdr(find, NULL);
}

__attribute__((destructor)) static void end(void) {
    const char * path = getenv("ALLOCATIONS");
    if (path && count) {
        const int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        dprintf(file, "%lu %s\n", count, program_invocation_name);
        close(file);
    }
}

static void note(const void * caller) {
    count += (uintptr_t) caller - first < last - first;
}

void * malloc(size_t size) {
    note(__builtin_return_address(0));
    return __libc_malloc(size);
}

void * calloc(size_t number, size_t size) {
    note(__builtin_return_address(0));
    return __libc_calloc(number, size);
}

void * realloc(void * memory, size_t size) {
    note(__builtin_return_address(0));
    return __libc_realloc(memory, size);
}
