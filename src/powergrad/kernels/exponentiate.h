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

/* 2^k exp(alpha (z - max)) for z <= max and some |k| <= 1/2 of the row, as 2^n 2^r with n whole and
 * |r| < 0.5005; a NaN stays one.
 *
 * The difference z - max, rounded to about -40, would be wrong by 2e-6, and then so would its
 * exponential, which may be all that a confident row's gradient is made of. It is not formed: with
 * a = alpha / ln 2, the exponent is a z less the nearest whole number to a max.
 *
 * Adding 1.5 * 2^23 rounds a number to a whole one and leaves that in the lowest bits; here these
 * are n + 127, by the choice of `shift`, and 2^n when moved into the place of the exponent. Below
 * `lowest` and at -inf, where they mean something else, the result is set to 0.
 *
 * r needs the product z * (high + low) to more than the 24 bits of a float: z * high - n is fused.
 * Where it is not, z is cut in two: its first 12 bits times the 12 bits of `high` are exact. */
TARGET static inline Floats NAME(power)(Floats z, Scale s) {
    Floats t = z * s.factor + s.shift;
    Floats n = t - s.shift;
#if FUSED
    Floats r = (z * s.high - n) + z * s.low;
#else
    Floats head = (Floats)((Bits)z & 0xfffff000);
    Floats r = (head * s.high - n) + ((z - head) * s.high + z * s.low);
#endif
    Floats e = POWER_OF_TWO(r) * (Floats)((Bits)t << 23);
    return (Floats)((Bits)e & ~(Bits)(z < s.lowest));
}

TARGET static inline float NAME(sum)(Floats v) {
    float s[LANES];
    memcpy(s, &v, sizeof s);
    for (int half = LANES / 2; half; half /= 2)
        for (int k = 0; k < half; k++)
            s[k] += s[k + half];
    return s[0];
}

/* Replaces z in `x`, whose `size` is a multiple of LANES, by multiples of exp(alpha (z - max)), and
 * sums these and those of exp(z - max).
 *
 * A lane adds up BLOCK values in float32, the rest adds up in float64, so that a long row is as
 * good as a short one. The arithmetic leaves time to fetch what comes next: a row to be read, and
 * one to be written. */
TARGET static inline Sums NAME(exponentiate)(float *x, int64_t size, float max, Scale alpha,
                                             Scale one, Ahead ahead) {
    alpha = scale_for(alpha, max);
    one = scale_for(one, max);
    Sums sums = {0, 0, power_at(max, one), power_at(max, alpha)};
    for (int64_t begin = 0; begin < size; begin += BLOCK * LANES) {
        int64_t end = min(begin + BLOCK * LANES, size);
        Floats plain = {0}, flat = {0};
        for (int64_t c = begin; c < end; c += LANES) {
            __builtin_prefetch(ahead.read + c * ahead.item);
            __builtin_prefetch(ahead.write + c * ahead.item, 1);
            Floats z;
            memcpy(&z, x + c, sizeof z);
            Floats e = NAME(power)(z, alpha);
            memcpy(x + c, &e, sizeof e);
            flat += e;
            plain += NAME(power)(z, one);
        }
        sums.plain += NAME(sum)(plain);
        sums.flat += NAME(sum)(flat);
    }
    return sums;
}

TARGET static void NAME(rows)(const Call *call, int64_t begin, int64_t end, float *scratch) {
    const int bfloat16 = call->bfloat16 != 0, maps = call->softcap != 0 || call->logit_scale != 1;
    switch (2 * bfloat16 + maps) { /* each is compiled on its own */
    case 0: rows(call, begin, end, scratch, 0, 0, LANES, NAME(exponentiate)); break;
    case 1: rows(call, begin, end, scratch, 0, 1, LANES, NAME(exponentiate)); break;
    case 2: rows(call, begin, end, scratch, 1, 0, LANES, NAME(exponentiate)); break;
    case 3: rows(call, begin, end, scratch, 1, 1, LANES, NAME(exponentiate)); break;
    }
}

#undef Floats
#undef Bits
#undef TARGET
#undef FUSED
#undef LANES
#undef NAME
