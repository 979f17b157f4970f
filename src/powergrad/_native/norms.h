/* Norms by vectors. norms.c includes this file once for each instruction set, having defined TARGET,
 * LANES and NAME as for exponentiate.h. */

typedef float NAME(Vector) __attribute__((vector_size(4 * LANES)));
#define Vector NAME(Vector)

/* The norms of `count` units, `stride` apart. Several are summed side by side, since an addition to
 * a sum has to wait for the one before; and far apart, since a CPU fetches more from several
 * streams of memory than from one. */
TARGET INLINE void NAME(some_norms)(const Tensor *t, int64_t unit, int64_t stride, int64_t group,
                                    const int count) {
    const int64_t size = t->size;
    const float *x[TOGETHER];
    Vector sums[TOGETHER] = {0};
    for (int k = 0; k < count; k++)
        x[k] = t->data + (unit + k * stride) * size;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int k = 0; k < count; k++) {
            Vector v;
            memcpy(&v, x[k] + i, sizeof v);
            v *= v;
            ROUND(v);
            sums[k] += v;
        }
    for (int k = 0; k < count; k++) {
        float sum = sums[k][0];
        for (int lane = 1; lane < LANES; lane++)
            sum += sums[k][lane];
        t->units[unit + k * stride] = sqrtf(add_squares(sum, x[k] + i, size - i, group));
    }
}

TARGET static void NAME(norms)(const Tensor *t, int64_t begin, int64_t end, int64_t group) {
    if (t->size == 1) { /* as in PyTorch: the square would underflow below 1e-23 */
        for (int64_t i = begin; i < end; i++)
            t->units[i] = fabsf(t->data[i]);
        return;
    }
    const int64_t stride = (end - begin) / TOGETHER;
    for (int64_t i = begin; i < begin + stride; i++)
        NAME(some_norms)(t, i, stride, group, TOGETHER);
    for (int64_t i = begin + TOGETHER * stride; i < end; i++)
        NAME(some_norms)(t, i, 0, group, 1);
}

TARGET static void NAME(scale)(const Tensor *t, int64_t begin, int64_t end, int64_t group) {
    (void)group;
    for (int64_t i = begin; i < end; i++) {
        const float factor = t->units[i];
        float *x = t->data + i * t->size;
        if (factor == 1)
            continue;
#pragma omp simd
        for (int64_t j = 0; j < t->size; j++)
            x[j] *= factor;
    }
}

#undef Vector
#undef TARGET
#undef LANES
#undef NAME
