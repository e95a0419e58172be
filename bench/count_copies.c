/* Counts the bytes that memcpy and memmove copy in this process. bench/micro.py preloads this library and calls copied_bytes(). */
#include <stdatomic.h>
#include <stddef.h>

static _Atomic unsigned long long total;

unsigned long long copied_bytes(void) { return total; }

/* Copies backward if a forward copy would overwrite bytes before it reads them. Compile it with
   -fno-tree-loop-distribute-patterns: otherwise the compiler may replace the loops with calls of memmove, which never return. */
void *memmove(void *to, const void *from, size_t size)
{
    char *target = to;
    const char *source = from;
    total += size;
    if (target <= source || target >= source + size)
        for (size_t i = 0; i < size; i++)
            target[i] = source[i];
    else
        for (size_t i = size; i-- > 0;)
            target[i] = source[i];
    return to;
}

void *memcpy(void *restrict to, const void *restrict from, size_t size) { return memmove(to, from, size); }
