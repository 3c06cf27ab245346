// Counts the allocations of Python's objects and buffers. The counter is the caller's.
#include <Python.h>
#include <stdint.h>

static PyMemAllocatorEx kept[2];
static uint64_t *counter;

static PyMemAllocatorEx *of(void *context) { return context; }

static void *count_malloc(void *context, size_t size) {
    ++*counter;
    return of(context)->malloc(of(context)->ctx, size);
}

static void *count_calloc(void *context, size_t number, size_t size) {
    ++*counter;
    return of(context)->calloc(of(context)->ctx, number, size);
}

static void *count_realloc(void *context, void *old, size_t size) {
    ++*counter;
    return of(context)->realloc(of(context)->ctx, old, size);
}

static void plain_free(void *context, void *old) { of(context)->free(of(context)->ctx, old); }

void count_allocations(uint64_t *place) {
    const PyMemAllocatorDomain domains[2] = {PYMEM_DOMAIN_MEM, PYMEM_DOMAIN_OBJ};
    counter = place;
    for (int i = 0; i < 2; ++i) {
        PyMem_GetAllocator(domains[i], &kept[i]);
        PyMemAllocatorEx counting = {&kept[i], count_malloc, count_calloc, count_realloc, plain_free};
        PyMem_SetAllocator(domains[i], &counting);
    }
}
