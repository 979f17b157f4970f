/* The vector core. kernel.c includes this file once for each instruction set, having defined
 *
 *     TARGET     the function attribute that selects the instruction set
 *     FUSED      1 where a * b + c is rounded once
 *     LANES      the number of floats in a vector
 *     NAME(f)    f with a suffix of its own
 */

typedef float NAME(Floats) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(Bits) __attribute__((vector_size(4 * LANES)));
#define Floats NAME(Floats)
#define Bits NAME(Bits)

/* exp(alpha (d + tail)) for d <= 0, as 2^n 2^r with n whole and |r| < 0.5001; a NaN stays one.
 *
 * Adding 1.5 * 2^23 rounds a number to a whole one and leaves that in the lowest bits: here
 * n + 127, which, shifted into the place of the exponent, is 2^n. Below `lowest` and at -inf, where
 * those bits mean something else, the result is set to 0.
 *
 * r needs the product d * (high + low) to more than the 24 bits of a float: d * high - n is fused.
 * Where it is not, d is cut in two: its first 12 bits times the 12 bits of `high` are exact.
 *
 * The polynomial is 2^r to a relative 9.4e-8 (minimax under p(0) = 1, so that exp(0) is 1). */
TARGET static inline Floats NAME(power)(Floats d, Floats tail, Scale s) {
    const float shift = 0x1.8p23f + 127;
    Floats t = d * s.factor + shift;
    Floats n = t - shift;
#if FUSED
    Floats r = (d * s.high - n) + d * s.low + tail * s.high;
#else
    Floats head = (Floats)((Bits)d & 0xfffff000);
    Floats r = (head * s.high - n) + ((d - head + tail) * s.high + d * s.low);
#endif
    Floats p = 0x1.5bd898p-10f * r + 0x1.3ce8c0p-7f;
    p = p * r + 0x1.c6b6dcp-5f;
    p = p * r + 0x1.ebf9c2p-3f;
    p = p * r + 0x1.62e42ap-1f;
    p = p * r + 1;
    Floats e = p * (Floats)((Bits)t << 23);
    return (Floats)((Bits)e & ~(Bits)(d < s.lowest));
}

TARGET static inline float NAME(sum)(Floats v) {
    float s[LANES];
    memcpy(s, &v, sizeof s);
    for (int half = LANES / 2; half; half /= 2)
        for (int k = 0; k < half; k++)
            s[k] += s[k + half];
    return s[0];
}

/* Replaces z by exp(alpha (z - max)) in `x`, whose `size` is a multiple of LANES; returns the sums
 * of exp(z - max) and of what it wrote.
 *
 * z - max is formed exactly, as d + tail: a d of about -40 may be wrong by 2e-6, and then so is
 * exp(d), which may be all that a confident row's gradient is made of. A lane adds up BLOCK values
 * in float32, the rest adds up in float64, so that a long row is as good as a short one.
 *
 * The arithmetic leaves time to fetch what comes next: a row to be read, and one to be written. */
TARGET static inline Sums NAME(exponentiate)(float *x, int64_t size, float max, Scale alpha,
                                             Ahead ahead) {
    const Scale one = scale_of(1);
    Sums sums = {0, 0};
    for (int64_t begin = 0; begin < size; begin += BLOCK * LANES) {
        int64_t end = min(begin + BLOCK * LANES, size);
        Floats plain = {0}, flat = {0};
        for (int64_t c = begin; c < end; c += LANES) {
            __builtin_prefetch(ahead.read + c * ahead.item);
            __builtin_prefetch(ahead.write + c * ahead.item, 1);
            Floats z;
            memcpy(&z, x + c, sizeof z);
            Floats d = z - max, back = d - z, tail = (z - (d - back)) - (max + back);
            Floats e = NAME(power)(d, tail, alpha);
            memcpy(x + c, &e, sizeof e);
            flat += e;
            plain += NAME(power)(d, tail, one);
        }
        sums.plain += NAME(sum)(plain);
        sums.flat += NAME(sum)(flat);
    }
    return sums;
}

TARGET static void NAME(rows)(const Call *call, int64_t begin, int64_t end, float *scratch) {
    if (call->bfloat16)
        rows(call, begin, end, scratch, 1, LANES, NAME(exponentiate));
    else
        rows(call, begin, end, scratch, 0, LANES, NAME(exponentiate));
}

#undef Floats
#undef Bits
#undef TARGET
#undef FUSED
#undef LANES
#undef NAME
