# type: ignore  (Triton's language, not Python's)
r"""Statistics and gradient of rows of logits on GPUs: two Triton kernels.

For a row of logits x with class y, class weights w, label smoothing eps, z-loss lambda and a weight
g of the row (`powergrad.rows` derives the formulas), put z = c tanh(s x / c) with a soft cap c,
otherwise z = s x; m = max z and d = z - m; t = w ((1 - eps) onehot(y) + eps / C), or the same with
class probabilities for onehot(y). Then, with sums over all classes,

    S = sum exp(d)          lse   = m + log S                of z: the value is taken here
    T = sum exp(alpha d)    lse_a = alpha m + log T          of alpha z: the gradient is taken here
    loss = g (sum(t) log S - sum(t d) + lambda lse^2)
    r    = (sum(t) + 2 lambda lse_a) / T
    dx_c = g (r exp(alpha d_c) - t_c) dz_c/dx_c              dz/dx = s (1 - tanh^2)

`statistics` reads x once and keeps (m, r, own) of each row, 12 bytes; `write` reads x again, in the
backward pass, and writes dx times the incoming gradient. So neither a loss scale nor 1/N needs a
pass or a synchronisation, float16 is rounded once, after the loss scale, a second backward pass
works, and a gate can be computed between the two kernels.

`own` is the gradient at z_y. There, 1 - p'_y would be lost where p'_y rounds to 1, so the sums
leave out the label. With `rest`, the T of the other classes, and t_y = w_y (1 - eps) + w_y eps / C,

    r exp(alpha d_y) - t_y = 2 lambda lse_a + (eps / C) (sum(w) - w_y) - r rest,

which is used where p'_y is above a half. Likewise log S = log1p(S - 1), where the largest class
contributes exactly 1 to S.

Multiplications and additions are fused only where `tl.fma` says so: the kernels are launched with
FP fusion disabled. With z = s x fused into z - m, the largest class would not have d = 0. Only what
Triton's interpreter can run is used: tanh and log1p are made of exp and series. Offsets have 64
bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-3.4028234e38)
ALL = tl.constexpr(tl.PropagateNan.ALL)
SHAPES = ["N", "stride_a", "stride_g", "stride_up", "ignore_index"]  # no variant for special values


@triton.jit
def _power(factor, d):
    """exp(alpha d) for factor = alpha log2(e); NaN stays NaN."""
    return tl.exp2(d * factor)


@triton.jit
def _below(z, m):
    """The difference, but finite at -inf and without overflow: 0 times it is 0. NaN stays NaN."""
    return tl.maximum(z - m, LOWEST, propagate_nan=ALL)


@triton.jit
def _log1p(r):
    """log(1 + r) for r > -1e-6: 2 artanh(r / (2 + r)) as a series up to r = 1."""
    s = r / (2.0 + r)
    square = s * s
    series = 1.0 / 17
    series = series * square + 1.0 / 15
    series = series * square + 1.0 / 13
    series = series * square + 1.0 / 11
    series = series * square + 1.0 / 9
    series = series * square + 1.0 / 7
    series = series * square + 1.0 / 5
    series = series * square + 1.0 / 3
    series = series * square + 1.0
    return tl.where(r <= 1.0, 2.0 * s * series, tl.log(1.0 + r))


@triton.jit
def _mapped(x, scale, cap, CAP: tl.constexpr):
    """Logits z and dz/dx; with e = exp(-2u), tanh u is (1 - e) / (1 + e).

    At small u, 1 - e loses digits; the series of tanh, up to u^9, is exact to 5e-8.
    """
    z = x * scale
    slope = scale
    if CAP:
        u = tl.abs(z) / cap
        e = _power(-2.0 * LOG2E, u)
        square = u * u
        series = square * (62.0 / 2835) - 17.0 / 315
        series = series * square + 2.0 / 15
        series = series * square - 1.0 / 3
        tanh = tl.where(u < 0.3, u + u * square * series, (1.0 - e) / (1.0 + e))
        slope = scale * (4.0 * e / ((1.0 + e) * (1.0 + e)))
        z = tl.where(z < 0, -cap * tanh, cap * tanh)
        z = tl.where(x == x, z, x)  # NaN
    return z, slope


@triton.jit
def _alphas(alphas, rows, inside, stride_a, alpha, ALPHAS: tl.constexpr, R: tl.constexpr):
    if ALPHAS:
        values = tl.load(alphas + rows * stride_a, mask=inside, other=1.0).to(tl.float32)
    else:
        values = tl.zeros([R], tl.float32) + alpha
    return values


@triton.jit
def _labels(y, rows, inside, stride_y, ignore_index, C, SOFT: tl.constexpr, R: tl.constexpr):
    """The label, or -1 if there is none; which rows count; and which of them are invalid."""
    if SOFT:
        label = tl.full([R], -1, tl.int32)
        keep = inside
        wrong = rows < 0
    else:
        target = tl.load(y + rows * stride_y, mask=inside, other=0)
        keep = inside & (target != ignore_index)
        valid = (target >= 0) & (target < C)
        label = tl.where(keep & valid, target, -1).to(tl.int32)
        wrong = keep & (label < 0)
    return label, keep, wrong


@triton.jit(do_not_specialize=SHAPES)
def statistics(
    x, y, w, alphas, g, z_factor,  # z_factor: of lambda, in memory, because it may be a quotient
    losses, kept, stats,  # (N), (3, N), (5, N)
    N, C, stride_n, stride_c, stride_y, stride_yc, stride_a, stride_g,
    ignore_index, alpha, scale, cap, smoothing, share, z_loss,
    R: tl.constexpr, BLOCK: tl.constexpr,
    SOFT: tl.constexpr, SMOOTH: tl.constexpr, WEIGHT: tl.constexpr, CAP: tl.constexpr,
    STATS: tl.constexpr, ALPHAS: tl.constexpr, G: tl.constexpr, Z_FACTOR: tl.constexpr,
):  # fmt: skip
    """Losses, what `write` needs, and statistics: lse, loss, p_target, entropy, largest class."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside = rows < N
    factor = _alphas(alphas, rows, inside, stride_a, alpha, ALPHAS, R)
    label, keep, wrong = _labels(y, rows, inside, stride_y, ignore_index, C, SOFT, R)
    a = factor
    factor = factor * LOG2E
    m = tl.full([R], MASKED, tl.float32)
    s = tl.zeros([R, BLOCK], tl.float32)  # sums of exp(d) and exp(alpha d), by column of the tile,
    t = tl.zeros([R, BLOCK], tl.float32)  # so that one reduction per tile, the maximum's, is enough
    ed = tl.zeros([R, BLOCK], tl.float32)  # of exp(d) d
    mass = tl.zeros([R], tl.float32)  # of t with class probabilities, otherwise of w
    mass_d = tl.zeros([R], tl.float32)  # of t d, or w d
    q_sum = tl.zeros([R], tl.float32)  # of class probabilities without weights and smoothing
    qd = tl.zeros([R], tl.float32)
    qe = tl.zeros([R], tl.float32)
    top = tl.zeros([R], tl.int32)
    for start in range(0, C, BLOCK):
        i = start + tl.arange(0, BLOCK)
        there = (i < C)[None, :] & keep[:, None]
        at = rows[:, None] * stride_n + i.to(tl.int64)[None, :] * stride_c
        v = tl.load(x + at, mask=there, other=MASKED).to(tl.float32)
        v, _ = _mapped(v, scale, cap, CAP)
        v = tl.where(there, v, MASKED)
        if STATS:
            highest, column = tl.max(v, 1, return_indices=True)
            top = tl.where(highest > m, column.to(tl.int32) + start, top)
        else:
            highest = tl.max(v, 1)
        new = tl.maximum(m, highest)
        shift = tl.where(new == MASKED, 0.0, new)
        d = _below(v, shift[:, None])
        own = i[None, :] == label[:, None]
        e = tl.where(own, 0.0, _power(LOG2E, d))
        f = tl.where(own | (v == MASKED), 0.0, _power(factor[:, None], d))
        # What was summed below another maximum is scaled.
        moved = tl.where(m == MASKED, 0.0, _below(m, shift))
        down = tl.where(m == MASKED, 0.0, _power(LOG2E, moved))
        down_a = tl.where(m == MASKED, 0.0, _power(factor, moved))
        if STATS:
            ed = tl.fma(moved[:, None], s, ed) * down[:, None] + e * d
        s = tl.fma(s, down[:, None], e)
        t = tl.fma(t, down_a[:, None], f)
        if SMOOTH or SOFT:
            if WEIGHT:
                of_class = tl.load(w + i, mask=i < C, other=0.0).to(tl.float32)[None, :]
            else:
                of_class = tl.where(i < C, 1.0, 0.0)[None, :]
            if SOFT:
                at = rows[:, None] * stride_y + i.to(tl.int64)[None, :] * stride_yc
                q = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
                of_class = of_class * (q * (1.0 - smoothing) + share)
                if STATS:
                    # Not `d`: a target on a masked class has an infinite loss.
                    q_all_d = tl.where(there, q * (v - shift[:, None]), 0.0)
                    qd = qd + moved * q_sum + tl.sum(q_all_d, 1)
                    q_sum = q_sum + tl.sum(q, 1)
                    qe = qe * down + tl.sum(q * e, 1)
            mass_d = mass_d + moved * mass
            mass_d = mass_d + tl.sum(tl.where(there, of_class * (v - shift[:, None]), 0.0), 1)
            mass = mass + tl.sum(tl.where(there, of_class, 0.0), 1)
        m = new
    rest_s = tl.sum(s, 1)
    rest_t = tl.sum(t, 1)
    m = tl.where(m == MASKED, 0.0, m)
    factor_z = z_loss
    if Z_FACTOR:
        factor_z = z_loss * tl.load(z_factor).to(tl.float32)

    if SOFT:
        total_s = rest_s
        total_t = rest_t
        log_s = tl.log(total_s)
        log_t = tl.log(total_t)
        loss = log_s * mass - mass_d
    else:
        local = label >= 0
        x_y = tl.load(
            x + rows * stride_n + label.to(tl.int64) * stride_c, mask=local, other=MASKED
        ).to(tl.float32)
        z_y, _ = _mapped(x_y, scale, cap, CAP)
        d_y = z_y - m
        own_s = _power(LOG2E, d_y)
        own_t = tl.where(z_y == MASKED, 0.0, _power(factor, _below(z_y, m)))
        total_s = rest_s + own_s
        total_t = rest_t + own_t
        is_top = d_y == 0
        log_s = _log1p(tl.where(is_top, rest_s, (rest_s - 1.0) + own_s))
        log_t = _log1p(tl.where(is_top, rest_t, (rest_t - 1.0) + own_t))
        weight = tl.zeros([R], tl.float32) + 1.0
        if WEIGHT:
            weight = tl.load(w + label, mask=local, other=1.0).to(tl.float32)
        w_sum = mass
        mass = (1.0 - smoothing) * weight
        loss = mass * (log_s - d_y)
        if SMOOTH:
            mass = mass + share * w_sum
            loss = loss + share * (log_s * w_sum - mass_d)
    # A row of nothing but -inf, or with an invalid label, is NaN; PyTorch stops the program there.
    log_s = tl.where((total_t == 0.0) | wrong, float("nan"), log_s)
    lse = m + log_s
    z_term = 2.0 * factor_z * (a * m + log_t)
    # log_s - log_s is 0 or NaN
    r = (mass + z_term) / total_t + (log_s - log_s)
    loss = loss + factor_z * lse * lse + (log_s - log_s)
    at_label = r
    if not SOFT:
        by_rest = z_term - r * rest_t
        if SMOOTH:
            by_rest = by_rest + share * (w_sum - weight)
        direct = r * own_t - weight * ((1.0 - smoothing) + share)
        at_label = tl.where(own_t < rest_t, direct, by_rest)
    if G:
        loss = loss * tl.load(g + rows * stride_g, mask=inside, other=0.0).to(tl.float32)
    tl.store(losses + rows, tl.where(keep, loss, 0.0), mask=inside)
    n = tl.zeros([R], tl.int64) + N
    tl.store(kept + rows, m, mask=inside)
    tl.store(kept + n + rows, r, mask=inside)
    tl.store(kept + 2 * n + rows, at_label, mask=inside)
    if STATS:
        ed_sum = tl.sum(ed, 1)
        if SOFT:
            plain = log_s * q_sum - qd
            p_target = qe / total_s
        else:
            ed_sum = ed_sum + own_s * _below(z_y, m)
            plain = log_s - d_y
            p_target = _power(-LOG2E, plain)
        tl.store(stats + rows, tl.where(keep, lse, 0.0), mask=inside)
        tl.store(stats + n + rows, tl.where(keep, plain, 0.0), mask=inside)
        tl.store(stats + 2 * n + rows, tl.where(keep, p_target, 0.0), mask=inside)
        tl.store(stats + 3 * n + rows, tl.where(keep, log_s - ed_sum / total_s, 0.0), mask=inside)
        tl.store(stats + 4 * n + rows, top.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=SHAPES)
def write(
    x, y, w, alphas, g, kept, up, grad,
    N, C, stride_n, stride_c, stride_y, stride_yc, stride_a, stride_g, stride_up, stride_grad,
    ignore_index, alpha, scale, cap, smoothing, share,
    R: tl.constexpr, BLOCK: tl.constexpr,
    SOFT: tl.constexpr, SMOOTH: tl.constexpr, WEIGHT: tl.constexpr, CAP: tl.constexpr,
    ALPHAS: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """The gradient, times the incoming gradient of the losses. Ignored rows are 0, and not read.

    `grad` may be `x`: an element is read before it is written, by the same thread, if the tile has
    at least one element per thread.
    """
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside = rows < N
    factor = _alphas(alphas, rows, inside, stride_a, alpha, ALPHAS, R) * LOG2E
    label, keep, _ = _labels(y, rows, inside, stride_y, ignore_index, C, SOFT, R)
    n = tl.zeros([R], tl.int64) + N
    m = tl.load(kept + rows, mask=inside, other=0.0)
    r = tl.load(kept + n + rows, mask=inside, other=0.0)
    at_label = tl.load(kept + 2 * n + rows, mask=inside, other=0.0)
    u = tl.load(up + rows * stride_up, mask=inside, other=0.0).to(tl.float32)
    if G:
        u = u * tl.load(g + rows * stride_g, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, C, BLOCK):
        i = start + tl.arange(0, BLOCK)
        here = (i < C)[None, :] & inside[:, None]
        there = here & keep[:, None]
        columns = i.to(tl.int64)[None, :]
        at = rows[:, None] * stride_n + columns * stride_c
        v = tl.load(x + at, mask=there, other=MASKED).to(tl.float32)
        v, slope = _mapped(v, scale, cap, CAP)
        f = tl.where(v == MASKED, 0.0, _power(factor[:, None], _below(v, m[:, None])))
        dz = r[:, None] * f
        if SMOOTH or SOFT:
            of_class = tl.zeros([1, BLOCK], tl.float32) + share
            if SOFT:
                at = rows[:, None] * stride_y + columns * stride_yc
                q = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
                of_class = q * (1.0 - smoothing) + share
            if WEIGHT:
                of_class *= tl.load(w + i, mask=i < C, other=0.0).to(tl.float32)[None, :]
            dz = dz - of_class
        dz = tl.where(i[None, :] == label[:, None], at_label[:, None], dz)
        dx = tl.where(keep[:, None], dz * (u[:, None] * slope), 0.0)
        to = rows[:, None] * stride_grad + columns
        tl.store(grad + to, dx.to(grad.dtype.element_ty), mask=here)
