/* The row statistics, coefficients and gradient of rows.py, in one pass over each row of logits.
 *
 * For a row of logits z with class y, class weights w, label smoothing eps, z-loss lambda and a
 * weight g of the row, put q = (1 - eps) onehot(y) + eps / C and d = z - max z. Then
 *
 *     loss = g (-sum(w q log p) + lambda lse(z)^2),  p  = softmax(z)       = exp(d) / sum(exp(d)),
 *     grad = g ((sum(w q) + extra) p' - w q),        p' = softmax(alpha z) ~ exp(alpha d),
 *
 * with extra = 2 lambda lse(alpha z). With a soft cap c and a scale s, logits x are mapped first, to
 * z = c tanh(s x / c), and the gradient at x is s (1 - (z / c)^2) times that at z.
 *
 * Plain C11 with the vector extensions of GCC and Clang; it knows nothing of Python or PyTorch. The
 * floating-point model is the standard one, except that a * b + c may be fused: -inf masks a class,
 * and a NaN, a +inf or a row of nothing but -inf gives a row of NaN, as in PyTorch.
 */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"

#define ABI 4               /* raised with every change to an exported signature */
#define BLOCK 32            /* values that a lane of a vector adds up in float32 */
#define TILE 16             /* the most rows that are processed together, */
#define TILE_SIZE 1024      /* and the most values in them */
#define MAX_LANES 16
#define LARGE 0x1p12f /* logits of which alpha * z loses more than z - max does */
#define SHIFT (0x1.8p23f + 127)
#define INLINE static inline __attribute__((always_inline))

/* The arguments of a call, each of 8 bytes: __init__.py packs them in this order. */
typedef struct {
    int64_t rows, classes;
    const char *logits;    /* rows x classes */
    int64_t stride;        /* from one row of logits to the next */
    int64_t bfloat16;      /* the type of `logits` and `grad`; otherwise float32 */
    const int64_t *target; /* of the rows */
    int64_t ignore_index;
    const float *weight; /* of the classes, or NULL */
    double smoothing;
    const double *alphas; /* of the rows, or NULL for `alpha` everywhere */
    double alpha;
    int64_t reduction; /* NONE, MEAN or SUM */
    float *value;      /* of the rows; or their mean or sum */
    char *grad;        /* of the value; rows x classes, contiguous; may be `logits` */
    const float *row_weight; /* of the rows, or NULL */
    double z_loss;
    double softcap; /* 0 for none */
    double logit_scale;
    int64_t threads;   /* at most */
    int64_t level;     /* of the instruction set, at most */

    /* The rest is computed by the kernel. */
    double total_weight; /* sum(w) */
    double factor;       /* of the gradient: a mean's divisor is in it */
    float *losses;       /* of the rows */
    float *scratch;      /* of all threads */
    int64_t room;        /* of one thread in it; half is for mapped logits */
} Call;

enum { NONE, MEAN, SUM };

_Static_assert(sizeof(Call) == 25 * 8, "a field of Call is not of 8 bytes");

typedef void (*Worker)(const Call *, int64_t begin, int64_t end, float *scratch);

/* What an exponential needs: alpha / ln 2, rounded, and as high + low, where `high` has 12 bits;
 * how far below the maximum the result is 0; and two numbers that depend on the row. */
typedef struct {
    float factor, high, low, reach;
    float shift, lowest;
} Scale;

/* The sums of exp(d) and of exp(alpha d), up to a factor of the row; and that factor, exp(0). */
typedef struct {
    double plain, flat, plain_one, flat_one;
} Sums;

/* Memory that is wanted soon. */
typedef struct {
    const char *read, *write;
    int item;
} Ahead;

typedef Sums (*Exponentiate)(float *x, int64_t size, float max, Scale alpha, Scale one, Ahead);

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t padded(int64_t size, int lanes) { return (size + lanes - 1) / lanes * lanes; }

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE int32_t ordered(int32_t bits) { return bits < 0 ? bits ^ INT32_MAX : bits; }

INLINE Scale scale_of(double alpha) {
    double factor = alpha * 0x1.71547652b82fep+0;
    float high = float_of(bits_of((float)factor) & 0xfffff000);
    return (Scale){(float)factor, high, (float)(factor - high), (float)(125 / factor), 0, 0};
}

/* At alpha 0 the reach is infinite, and only -inf, a masked class, is below the lowest. */
INLINE Scale scale_for(Scale scale, float max) {
    scale.shift = SHIFT - rintf(max * scale.factor);
    scale.lowest = max - scale.reach < -FLT_MAX ? -FLT_MAX : max - scale.reach;
    return scale;
}

/* To a relative 9.7e-8 for |r| < 0.5005: the minimax polynomial that is 1 at 0. */
#define POWER_OF_TWO(r)                                                                           \
    (((((0x1.5bd898p-10f * (r) + 0x1.3ce8c0p-7f) * (r) + 0x1.c6b6dcp-5f) * (r) + 0x1.ebf9c2p-3f) * \
          (r) + 0x1.62e42ap-1f) * (r) + 1)

/* What the vectors make of exp(0), that is, of z = max. */
INLINE double power_at(float max, Scale s) {
    double r = (double)s.high * max + (double)s.low * max - (SHIFT - s.shift);
    return POWER_OF_TWO(r);
}

/* bfloat16 is the upper half of a float; rounding is to nearest, ties to even. */
INLINE uint16_t bfloat16_of(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return value != value ? 0x7fc0 : (uint16_t)rounded;
}

INLINE float value_at(const void *row, int64_t c, int bfloat16) {
    if (bfloat16)
        return float_of((uint32_t)((const uint16_t *)row)[c] << 16);
    return ((const float *)row)[c];
}

INLINE void set_value(void *row, int64_t c, float value, int bfloat16) {
    if (bfloat16)
        ((uint16_t *)row)[c] = bfloat16_of(value);
    else
        ((float *)row)[c] = value;
}

/* Copies a row in float32 and returns its maximum. The bits of floats are in the order of the
 * floats, once those of negative ones are turned round; and compilers make vectors of a maximum of
 * integers, where that of floats makes them think of NaN. A NaN is left to the arithmetic. */
INLINE float copy_row(float *restrict x, const void *restrict row, int64_t classes, int bfloat16) {
    int32_t largest = INT32_MIN;
    for (int64_t c = 0; c < classes; c++) {
        x[c] = value_at(row, c, bfloat16);
        int32_t key = ordered((int32_t)bits_of(x[c]));
        largest = key > largest ? key : largest;
    }
    return float_of((uint32_t)ordered(largest));
}

/* 2^r - 1 = r Q(r): Q to a relative 1.1e-8 for |r| < 0.5005, so that it is good at small r, too. */
#define POWER_LESS_ONE(r)                                                                         \
    ((r) * (((((0x1.4308fap-13f * (r) + 0x1.5f0878p-10f) * (r) + 0x1.3b2ba0p-7f) * (r) +          \
              0x1.c6af6ep-5f) * (r) + 0x1.ebfbdep-3f) * (r) + 0x1.62e430p-1f))

/* cap tanh(x / cap), with -2 / (cap ln 2) as the factor: tanh |t| = -m / (2 + m) with
 * m = exp(-2 |t|) - 1 = 2^n (2^r - 1) + (2^n - 1). Where 2^n < 2^-64, m is -1. A NaN stays one. */
INLINE float capped(float x, float factor, float cap) {
    float t = fabsf(x) * factor;
    t = t < -64 ? -64 : t;
    const float shifted = t + SHIFT, power = float_of(bits_of(shifted) << 23);
    const float r = t - (shifted - SHIFT);
    const float m = power * POWER_LESS_ONE(r) + (power - 1);
    return copysignf(cap * m / (2 + m), x);
}

/* Replaces logits by z, and returns the maximum of their copy in `x`. */
INLINE float map_row(float *restrict z, float *restrict x, double scale, double cap,
                     int64_t classes) {
    const float factor = (float)(cap != 0 ? -0x1.71547652b82fep+1 * scale / cap : scale);
    if (cap != 0) {
#pragma omp simd
        for (int64_t c = 0; c < classes; c++)
            z[c] = capped(z[c], factor, (float)cap);
    } else {
#pragma omp simd
        for (int64_t c = 0; c < classes; c++)
            z[c] *= factor;
    }
    return copy_row(x, z, classes, 0);
}

/* sum(w d): all its terms have one sign, unlike those of sum(w z). */
INLINE double weighted_sum(const void *row, const float *w, float max, int64_t classes,
                           int bfloat16, int lanes) {
    double total = 0;
    for (int64_t begin = 0; begin < classes; begin += BLOCK * lanes) {
        int64_t end = min(begin + BLOCK * lanes, classes);
        float sum = 0;
        if (w) {
#pragma omp simd reduction(+ : sum)
            for (int64_t c = begin; c < end; c++)
                sum += w[c] * (value_at(row, c, bfloat16) - max);
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t c = begin; c < end; c++)
                sum += value_at(row, c, bfloat16) - max;
        }
        total += sum;
    }
    return total;
}

/* (scale x - share w) (1 - (z / cap)^2); without weights w is 1, and without a cap z is NULL. */
INLINE void write_grad(void *restrict grad, const float *restrict x, float scale, const float *w,
                       float share, const float *z, float cap, int64_t classes, int bfloat16) {
    const float inverse = 1 / cap;
#pragma omp simd
    for (int64_t c = 0; c < classes; c++) {
        float value = scale * x[c] - (w ? share * w[c] : share), tanh = z ? z[c] * inverse : 0;
        set_value(grad, c, z ? value * (1 - tanh * tanh) : value, bfloat16);
    }
}

/* log1p to a relative 1e-8, in less time. */
INLINE double log_of_one_plus(double x) { return x < 0x1p-26 ? x : log(1 + x); }

/* Rows [begin, end). Each is copied to `scratch`, padded with -inf, worked on there, and written.
 * Short rows go through each step together: one alone would wait for its own results.
 *
 * With mass = sum(w q), share = eps / C, and rest the sum of exp(alpha d) over the classes but y,
 *
 *     grad_y = mass (1 - rest / sum) - w_y q_y = share (sum(w) - w_y) - mass rest / sum
 *
 * loses nothing where p'_y rounds to 1, provided that rest does not. If y is not the likeliest
 * class, that one contributes exp(0) = 1 to rest, and rest = sum - exp(alpha d_y) is safe. If it
 * is, its own exp(0) = 1 is kept out of the sums, by -inf in the copy, and added at the end. The
 * loss, which is log(sum(exp(d))) - d_y without smoothing, gains as much. */
INLINE void rows(const Call *call, int64_t begin, int64_t end, float *scratch, const int bfloat16,
                 const int maps, const int lanes, Exponentiate exponentiate) {
    const int64_t classes = call->classes, width = padded(classes, lanes);
    const int64_t room = width < TILE_SIZE ? min(TILE, TILE_SIZE / width) : 1;
    const int item = bfloat16 ? sizeof(uint16_t) : sizeof(float);
    const float *w = call->weight;
    const double kept = 1 - call->smoothing, share = call->smoothing / (double)classes;
    const double factor = call->factor;
    const Scale one = scale_of(1), common = scale_of(call->alpha);
    const double cap = call->softcap, logit_scale = call->logit_scale;
    float *mapped = scratch + call->room / 2;

    for (int64_t next = begin; next < end;) {
        int64_t row[TILE];
        float max[TILE], peak[TILE], d[TILE]; /* the maximum, that of the copy, and z_y - max z */
        Sums sums[TILE];
        int count = 0;

        for (; count < room && next < end; next++) {
            int64_t y = call->target[next];
            if (y == call->ignore_index) {
                memset(call->grad + next * classes * item, 0, (size_t)(classes * item));
                call->losses[next] = 0;
                continue;
            }
            float *x = scratch + count * width;
            const char *logits = call->logits + next * call->stride * item;
            float *z = maps ? mapped + count * width : x;
            float highest = copy_row(z, logits, classes, bfloat16);
            if (maps)
                highest = map_row(z, x, logit_scale, cap, classes);
            d[count] = x[y] - highest;
            x[y] = d[count] == 0 ? -INFINITY : x[y];
            for (int64_t c = classes; c < width; c++)
                x[c] = -INFINITY;
            max[count] = peak[count] = highest;
            if (!(fabsf(highest) < LARGE)) { /* or NaN */
                peak[count] = highest - highest;
                for (int64_t c = 0; c < width; c++)
                    x[c] -= highest;
            }
            row[count++] = next;
        }

        for (int k = 0; k < count; k++) {
            Ahead ahead = {call->logits + min(next + k, end - 1) * call->stride * item,
                           call->grad + row[k] * classes * item, item};
            Scale alpha = call->alphas ? scale_of(call->alphas[row[k]]) : common;
            sums[k] = exponentiate(scratch + k * width, width, peak[k], alpha, one, ahead);
        }

        for (int k = 0; k < count; k++) {
            const char *logits = call->logits + row[k] * call->stride * item;
            float *x = scratch + k * width;
            const float *z = mapped + k * width;
            char *grad = call->grad + row[k] * classes * item;
            const int64_t y = call->target[row[k]];
            const int top = d[k] == 0;
            const double weight = w ? w[y] : 1;
            const double mass = kept * weight + share * call->total_weight;

            const double log_sum = log_of_one_plus(sums[k].plain / sums[k].plain_one - !top);
            double loss = kept * weight * (log_sum - d[k]);
            if (share != 0)
                loss += share * (log_sum * call->total_weight -
                                 (maps ? weighted_sum(z, w, max[k], classes, 0, lanes)
                                       : weighted_sum(logits, w, max[k], classes, bfloat16, lanes)));
            const double rest = sums[k].flat - x[y];
            const double total = sums[k].flat + (top ? sums[k].flat_one : 0);
            double extra = 0;
            if (call->z_loss != 0) {
                const double lse = max[k] + log_sum;
                const double alpha = call->alphas ? call->alphas[row[k]] : call->alpha;
                loss += call->z_loss * lse * lse;
                extra = 2 * call->z_loss * (alpha * max[k] + log(total / sums[k].flat_one));
            }
            const double of_row = call->row_weight ? call->row_weight[row[k]] : 1;
            call->losses[row[k]] = (float)(of_row * loss);

            const double g = factor * of_row * logit_scale, unit = g / total;
            const float own = (float)(g * share * (call->total_weight - weight) +
                                      (extra * (total - rest) - mass * rest) * unit);
            const float of_p = (float)((mass + extra) * unit), of_w = (float)(g * share);
            const float tanh_y = cap != 0 ? z[y] / (float)cap : 0;
            /* Last, because the gradient may go where the logits are. */
            write_grad(grad, x, of_p, share != 0 ? w : NULL, of_w, cap != 0 ? z : NULL, (float)cap,
                       classes, bfloat16);
            set_value(grad, y, own * (1 - tanh_y * tanh_y), bfloat16);
        }
    }
}

/* The instruction sets, from the one that every CPU of the architecture has. */

#define TARGET
#if defined(__aarch64__) || defined(__FMA__)
#define FUSED 1
#else
#define FUSED 0
#endif
#define LANES 4
#define NAME(f) f##_baseline
#include "exponentiate.h"

#if defined(__x86_64__)

#define TARGET __attribute__((target("avx2,fma")))
#define FUSED 1
#define LANES 8
#define NAME(f) f##_avx2
#include "exponentiate.h"

#define TARGET __attribute__((target("avx512f")))
#define FUSED 1
#define LANES 16
#define NAME(f) f##_avx512
#include "exponentiate.h"

static const Worker LEVELS[] = {rows_baseline, rows_avx2, rows_avx512};

int powergrad_best_level(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return 2;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

#else

static const Worker LEVELS[] = {rows_baseline};

int powergrad_best_level(void) { return 0; }

#endif

static void work(const void *argument, int64_t part, int64_t parts) {
    const Call *call = argument;
    const Worker worker = LEVELS[min(call->level, powergrad_best_level())];
    worker(call, call->rows * part / parts, call->rows * (part + 1) / parts,
           call->scratch + part * call->room);
}

/* A row is computed alike in whichever thread: the result does not depend on their number. Returns
 * 0 if memory is short. */
static int work_in_threads(Call *call) {
    int64_t threads = threads_for(call->rows * call->classes, call->threads);
    threads = call->rows && call->rows < threads ? call->rows : threads;
    call->room = 2 * padded(TILE_SIZE + call->classes, MAX_LANES);
    call->scratch = aligned_alloc(64, (size_t)(threads * call->room) * sizeof(float));
    if (!call->scratch)
        return 0;
    in_threads(work, call, threads);
    free(call->scratch);
    return 1;
}

int powergrad_abi(void) { return ABI; }

/* Returns 0; or, having written nothing, i + 1 for the first row i whose target is neither a class
 * nor `ignore_index`, or -1 if memory is short. */
int64_t powergrad_cross_entropy(const Call *arguments) {
    Call call = *arguments;
    const float *w = call.weight;
    int64_t counted = 0;
    double target_weight = 0;
    for (int64_t i = 0; i < call.rows; i++) {
        int64_t y = call.target[i];
        if (y == call.ignore_index)
            continue;
        if (y < 0 || y >= call.classes)
            return i + 1;
        counted++;
        target_weight += w ? w[y] : 0;
    }
    call.total_weight = w ? 0 : (double)call.classes;
    for (int64_t c = 0; w && c < call.classes; c++)
        call.total_weight += w[c];
    /* Weights that count and sum to 0 give NaN, as in PyTorch, not infinity. */
    const double mass = w ? (target_weight != 0 ? target_weight : NAN) : (double)counted;
    call.factor = call.reduction == MEAN ? 1 / mass : 1;
    if (w && call.reduction == MEAN) /* the z-loss of a mean has the number of rows as divisor */
        call.z_loss *= mass / (double)counted;

    float *reduced = NULL;
    if (call.reduction != NONE && !(reduced = malloc((size_t)(call.rows + 1) * sizeof(float))))
        return -1;
    call.losses = reduced ? reduced : call.value;
    const int done = work_in_threads(&call);
    if (done && reduced) {
        double sum = 0;
        for (int64_t i = 0; i < call.rows; i++)
            sum += reduced[i];
        *call.value = (float)(call.factor * sum);
    }
    free(reduced);
    return done ? 0 : -1;
}
