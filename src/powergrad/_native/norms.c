/* The Euclidean norms of the units of tensors, with the bits of PyTorch's, and scaling by unit.
 *
 * PyTorch sums the squares of a contiguous row in the lanes of one vector, adds the lanes in order,
 * then the elements that do not fill a vector. The norm of a single element is its absolute value.
 * How wide the vector is, and which of the last products are rounded before they are added, depends
 * on how and for which CPU PyTorch was compiled: the caller tries which of the orders here, if any,
 * gives its bits.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "threads.h"

#define TOGETHER 4 /* units that are summed side by side */
#define INLINE static inline __attribute__((always_inline))

/* Keeps the compiler from fusing a product with the addition that follows. */
#if defined(__x86_64__)
#define ROUND(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define ROUND(x) __asm__("" : "+w"(x))
#else
#define ROUND(x) __asm__("" : "+m"(x))
#endif

/* Each field is of 8 bytes: norms.py packs them in this order. */
typedef struct {
    float *data;   /* count x size, contiguous */
    int64_t count; /* of units */
    int64_t size;  /* of a unit */
    float *units;  /* one number per unit: its norm, or the factor to scale it by */
} Tensor;

typedef void (*Function)(const Tensor *, int64_t begin, int64_t end, int64_t group);

typedef struct {
    const Tensor *tensors;
    int64_t count, total; /* of tensors, and of values in them */
    Function function;
    int64_t group;
} Call;

/* sum + x_0^2 + x_1^2 + ... in order; the squares of whole groups are rounded, others are fused. */
INLINE float add_squares(float sum, const float *x, int64_t size, int64_t group) {
    const int64_t rounded = size / group * group;
    for (int64_t i = 0; i < rounded; i++) {
        float square = x[i] * x[i];
        ROUND(square);
        sum += square;
    }
    for (int64_t i = rounded; i < size; i++)
        sum = fmaf(x[i], x[i], sum);
    return sum;
}

#define TARGET
#define LANES 4
#define NAME(f) f##_baseline
#include "norms.h"

#if defined(__x86_64__)

#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define NAME(f) f##_avx2
#include "norms.h"

#define TARGET __attribute__((target("avx512f")))
#define LANES 16
#define NAME(f) f##_avx512
#include "norms.h"

static const Function NORMS[] = {norms_baseline, norms_avx2, norms_avx512};
static const Function SCALE[] = {scale_baseline, scale_avx2, scale_avx512};

#else

static const Function NORMS[] = {norms_baseline};
static const Function SCALE[] = {scale_baseline};

#endif

/* A unit belongs to the part that contains its first value. */
static void work(const void *argument, int64_t part, int64_t parts) {
    const Call *call = argument;
    const int64_t first = call->total / parts * part;
    const int64_t last = part + 1 < parts ? call->total / parts * (part + 1) : call->total;
    int64_t before = 0;
    for (const Tensor *t = call->tensors; t < call->tensors + call->count; t++) {
        int64_t begin = (first - before + t->size - 1) / t->size;
        int64_t end = (last - before + t->size - 1) / t->size;
        begin = begin < 0 ? 0 : begin;
        end = end > t->count ? t->count : end;
        if (begin < end)
            call->function(t, begin, end, call->group);
        before += t->count * t->size;
    }
}

static void call_in_threads(Call call, int64_t threads) {
    for (int64_t i = 0; i < call.count; i++)
        call.total += call.tensors[i].count * call.tensors[i].size;
    in_threads(work, &call, threads_for(call.total, threads));
}

/* `level` is one that this CPU has, see kernel.c; it decides how many lanes a vector has. */
void powergrad_norms(const Tensor *tensors, int64_t count, int64_t level, int64_t group,
                     int64_t threads) {
    call_in_threads((Call){tensors, count, 0, NORMS[level], group}, threads);
}

void powergrad_scale(const Tensor *tensors, int64_t count, int64_t level, int64_t threads) {
    call_in_threads((Call){tensors, count, 0, SCALE[level], 1}, threads);
}
