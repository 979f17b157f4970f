/* Threads that live for one call, so that a process may fork between calls. */

#include <pthread.h>
#include <stdint.h>

#define MAX_THREADS 256
#define PART_SIZE (1 << 18) /* values that are worth a thread */

/* Does part `part` of `parts` of what `call` describes. */
typedef void (*Work)(const void *call, int64_t part, int64_t parts);

typedef struct {
    Work work;
    const void *call;
    int64_t part, parts;
} Part;

static inline void *do_part(void *argument) {
    const Part *part = argument;
    part->work(part->call, part->part, part->parts);
    return 0;
}

/* How many threads `size` values are worth, of the `threads` that there are. */
static inline int64_t threads_for(int64_t size, int64_t threads) {
    int64_t parts = size / PART_SIZE < threads ? size / PART_SIZE : threads;
    return parts < 1 ? 1 : parts < MAX_THREADS ? parts : MAX_THREADS;
}

/* A part whose thread cannot be started is done by this one. */
static inline void in_threads(Work work, const void *call, int64_t threads) {
    Part parts[MAX_THREADS];
    pthread_t ids[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    for (int64_t i = 0; i < threads; i++) {
        parts[i] = (Part){work, call, i, threads};
        started[i] = i > 0 && pthread_create(&ids[i], 0, do_part, &parts[i]) == 0;
    }
    for (int64_t i = 0; i < threads; i++)
        if (!started[i])
            do_part(&parts[i]);
    for (int64_t i = 0; i < threads; i++)
        if (started[i])
            pthread_join(ids[i], 0);
}
