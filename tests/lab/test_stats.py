"""The statistics: each against scipy or a count written another way, then the rule as a whole.

Simulations have fixed seeds. `DIGITS` is the noise of a small study: 0.3 points between runs, on a
test set of 360 images, so that accuracies are multiples of 100 / 360.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate
from scipy import stats as scipy_stats

from powergrad.lab import plan as planning
from powergrad.lab.plan import (
    KNOWN_NOISE,
    Noise,
    detection_power,
    estimate_noise,
    least_seeds,
    minimum_detectable_effect,
    plan,
    seeds_needed,
    seeds_to_settle,
)
from powergrad.lab.stats import (
    by_arm_and_seed,
    compare,
    crossed_bootstrap,
    holm,
    probability_of_improvement,
    sign_flip_test,
    t_interval,
    tost,
    welch,
)

stats: Any = scipy_stats  # whose results are typed as less than they are

DIGITS = 0.3
STEP = 100 / 360
STUDIES = 2000
SEEDS = 8


def accuracies(rng, shape, quantised, mean=97.0):
    values = rng.normal(mean, DIGITS, shape)
    return np.round(values / STEP) * STEP if quantised else values


def study(**arms):
    return {arm: dict(enumerate(map(float, values))) for arm, values in arms.items()}


def detectable(*args, **kwargs) -> float:
    effect = minimum_detectable_effect(*args, **kwargs)
    assert effect is not None
    return effect


def rejected(values, level=0.05):
    """Which arms of shape (studies, arms, seeds), the first of them the baseline, differ."""
    return holm(sign_flip_test(values[:, 1:] - values[:, :1])) < level


# The rule: the three figures that it must keep ---------------------------------------------------


def test_null_studies_are_called_better_or_worse_as_rarely_as_promised():
    runs = accuracies(np.random.default_rng(0), (STUDIES, 2, SEEDS), quantised=False)
    called = rejected(runs)[:, 0]
    assert called.mean() <= 0.055
    assert called.mean() >= 0.035  # 12 of the 256 sign patterns are 4.7%
    for (baseline, arm), differs in zip(runs[:300], called[:300], strict=True):
        (r,) = compare(study(baseline=baseline, pgt=arm), "baseline", margin=0.3, resamples=10)
        assert (r.verdict in ("better", "worse")) == differs


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("arms", [1, 2, 3])
def test_null_studies_of_several_arms_are_rarely_called_anything(quantised, arms):
    rng = np.random.default_rng(arms)
    runs = accuracies(rng, (STUDIES, arms + 1, SEEDS), quantised)
    assert rejected(runs).any(-1).mean() <= 0.055


@pytest.mark.parametrize("quantised", [False, True])
def test_t_intervals_cover(quantised):
    rng = np.random.default_rng(5)
    arm = accuracies(rng, (STUDIES, SEEDS), quantised, mean=97.4)
    baseline = accuracies(rng, (STUDIES, SEEDS), quantised, mean=97.0)
    ends = np.array([t_interval(d) for d in arm - baseline])
    covered = (ends[:, 0] <= 0.4) & (ends[:, 1] >= 0.4)
    assert abs(covered.mean() - 0.95) <= 0.015


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("seeds", "arms"), [(8, 1), (8, 3), (10, 1)])
def test_one_minimum_detectable_effect_is_found_in_four_of_five_studies(seeds, arms, quantised):
    sigma = accuracies(np.random.default_rng(6), 200_000, quantised).std()
    effect = detectable(
        sigma * math.sqrt(2), seeds, comparisons=arms, step=STEP if quantised else 0.0
    )
    rng = np.random.default_rng(seeds)
    runs = accuracies(rng, (STUDIES, arms + 1, seeds), quantised)
    runs[:, 1] = accuracies(rng, (STUDIES, seeds), quantised, mean=97 + effect)
    assert abs(rejected(runs)[:, 0].mean() - 0.8) <= 0.04
    for values in runs[:5]:
        named = study(**{f"arm{i}": of_arm for i, of_arm in enumerate(values)})
        first = compare(named, "arm0", margin=0.3, resamples=10)[0]
        assert (first.verdict == "better") == rejected(values[None])[0, 0]


def test_metrics_in_steps_are_noticed():
    """A step as wide as the noise costs a tenth of the power, if it is not taken into account."""
    rng = np.random.default_rng(1)
    coarse, fine = (accuracies(rng, (2, SEEDS), quantised) for quantised in (True, False))
    for runs, step in ((coarse, STEP), (fine, 0.0)):
        (r,) = compare(study(baseline=runs[0], pgt=runs[1]), "baseline", margin=0.3)
        sd = (runs[1] - runs[0]).std(ddof=1)
        assert r.mde == pytest.approx(detectable(sd, SEEDS, step=step))
        assert r.seeds_needed == seeds_to_settle(sd, 0.3, step=step)
        rounded = study(baseline=runs[0].round(2), pgt=runs[1].round(2))  # as files have them
        (s,) = compare(rounded, "baseline", margin=0.3, step=step)
        assert s.mde == pytest.approx(r.mde, rel=0.05)
    smooth, stepped = (detectable(0.44, SEEDS, step=step) for step in (0, STEP))
    assert detection_power(smooth / 0.44, SEEDS, step=STEP / 0.44) == pytest.approx(0.7, abs=0.03)
    assert detection_power(stepped / 0.44, SEEDS, step=STEP / 0.44) == pytest.approx(0.8, abs=0.01)


def test_steps_cost_little_with_many_seeds():
    """Beyond 12 seeds their cost is a formula: within 3% of power of what it should be."""
    sigma = accuracies(np.random.default_rng(6), 200_000, quantised=True).std()
    effect = detectable(sigma * math.sqrt(2), 14, step=STEP)
    rng = np.random.default_rng(8)
    baseline = accuracies(rng, (STUDIES, 14), quantised=True)
    arm = accuracies(rng, (STUDIES, 14), quantised=True, mean=97 + effect)
    assert abs((sign_flip_test(arm - baseline) < 0.05).mean() - 0.8) <= 0.04


# Tests -------------------------------------------------------------------------------------------


def flips_by_convolution(differences):
    """Exact p for integer differences: the distribution of the signed sum, one term at a time."""
    sums = Counter({0: 1})
    for d in differences:
        following: Counter[int] = Counter()
        for total, ways in sums.items():
            following[total + d] += ways
            following[total - d] += ways
        sums = following
    observed = abs(sum(differences))
    reached = sum(ways for total, ways in sums.items() if abs(total) >= observed)
    return reached / 2 ** len(differences)


@given(st.lists(st.integers(-6, 6), min_size=1, max_size=9))
def test_sign_flips_are_counted_exactly_with_ties(steps):
    exact = [Fraction(step, 360) for step in steps]
    patterns = [
        abs(sum((s * d for s, d in zip(signs, exact, strict=True)), Fraction(0)))
        for signs in product((-1, 1), repeat=len(exact))
    ]
    expected = np.mean([total >= abs(sum(exact)) for total in patterns])
    # As accuracies give them: differences of rounded percentages, which are not exact multiples.
    baseline = 100 * 350 / 360
    differences = np.array([100 * (350 + step) / 360 for step in steps]) - baseline
    assert float(sign_flip_test(differences)) == expected


@pytest.mark.parametrize("n", [2, 5, 8, 11])
def test_sign_flip_is_scipys(n):
    d = np.random.default_rng(n).normal(0.5, 1, n)
    reference = stats.permutation_test(
        (d,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    assert float(sign_flip_test(d)) == pytest.approx(reference.pvalue, abs=1e-12)


@pytest.mark.parametrize("n", [16, 20])
def test_sign_flip_is_exact_up_to_twenty(n):
    steps = np.random.default_rng(n).integers(-3, 7, n)
    assert float(sign_flip_test(steps)) == flips_by_convolution(steps.tolist())


def test_sign_flip_beyond_twenty_is_drawn_and_repeats():
    steps = np.random.default_rng(1).integers(-5, 8, 26)
    exact = flips_by_convolution(steps.tolist())
    p = float(sign_flip_test(steps))
    assert 0.01 < exact < 0.5
    assert abs(p - exact) < 4 * math.sqrt(exact * (1 - exact) / 99_999)
    assert p == float(sign_flip_test(steps))
    assert p != float(sign_flip_test(steps, seed=1))
    # (b + 1) / (m + 1): never 0.
    assert float(sign_flip_test(np.ones(60), draws=999)) == 1 / 1000


@pytest.mark.parametrize("n", [8, 16, 22])
def test_sign_flip_of_many_studies_is_that_of_each(n):
    d = np.random.default_rng(n).normal(0.3, 1, (2, 5, n))
    together = sign_flip_test(d)
    assert together.shape == d.shape[:-1]
    each = [[float(sign_flip_test(row)) for row in rows] for rows in d]
    np.testing.assert_array_equal(together, each)


def test_sign_flip_of_no_difference_at_all():
    assert float(sign_flip_test(np.zeros(8))) == 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0.001, 0.999))
def test_holm_rejects_what_the_stepwise_procedure_rejects(p_values, level):
    remaining = sorted(range(len(p_values)), key=lambda i: p_values[i])
    accepted = set(remaining)
    for step, i in enumerate(remaining):
        if not p_values[i] * (len(p_values) - step) < level:
            break
        accepted.discard(i)
    adjusted = holm(p_values)
    np.testing.assert_array_equal(
        adjusted < level, [i not in accepted for i in range(len(p_values))]
    )
    assert (adjusted >= p_values).all()
    assert (adjusted <= 1).all()


def test_holm_of_many_studies_is_that_of_each():
    p = np.random.default_rng(0).random((5, 4))
    np.testing.assert_array_equal(holm(p), [holm(row) for row in p])


@pytest.mark.parametrize("n", [2, 3, 8, 30])
def test_t_interval_and_welch_are_scipys(n):
    rng = np.random.default_rng(n)
    a, b = rng.normal(1.0, 1, n), rng.normal(0.6, 2, n)
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert t_interval(a - b) == pytest.approx((interval.low, interval.high), rel=1e-12)
    longer = rng.normal(0.5, 1, n + 3)
    assert welch(a, longer) == pytest.approx(
        stats.ttest_ind(a, longer, equal_var=False).pvalue, rel=1e-9
    )


@pytest.mark.parametrize("mean", [-0.8, 0.0, 0.3, 1.5])
def test_tost_is_two_one_sided_t_tests_and_a_90_per_cent_interval(mean):
    d = np.random.default_rng(3).normal(mean, 1, 12)
    margin = 1.0
    above = stats.ttest_1samp(d, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(d, margin, alternative="less").pvalue
    assert tost(d, margin) == pytest.approx(max(above, below), rel=1e-9)
    low, high = t_interval(d, level=0.10)
    assert (tost(d, margin) < 0.05) == (-margin < low and high < margin)


def test_without_any_variance_the_answer_is_certain():
    zero, half = np.zeros(6), np.full(6, 0.5)
    assert tost(zero, 0.1) == 0
    assert tost(half, 0.5) == 1  # the margin itself is not inside
    assert t_interval(half) == (0.5, 0.5)
    assert welch(zero, zero) == 1
    assert welch(zero, half) == 0


# Resampling --------------------------------------------------------------------------------------


def test_crossed_bootstrap_has_the_variance_of_drawing_seeds_and_examples():
    rng = np.random.default_rng(0)
    seeds, examples = 6, 400
    skill = rng.random(examples)  # some examples are hard for every run
    a = (rng.random((seeds, examples)) < 0.3 + 0.7 * skill + rng.normal(0, 0.03, (seeds, 1))) * 1.0
    b = (rng.random((seeds, examples)) < 0.2 + 0.7 * skill) * 1.0
    d = a - b

    # The mean is u'dv with u and v multinomial counts over their number n, so that the mean of
    # uu' is (1 + (n - 1) / n) / n^2 on the diagonal and (n - 1) / n^3 beside it.
    def second(n):
        return (np.eye(n) + np.full((n, n), (n - 1) / n)) / n**2

    moment = np.trace(second(seeds) @ d @ second(examples) @ d.T)
    sd = math.sqrt(moment - d.mean() ** 2)
    low, high = crossed_bootstrap(a, b, resamples=20_000)
    reach = stats.norm.isf(0.025)
    # 20,000 resamples place a percentile within 0.02 sd (one standard error); the law is not
    # quite normal.
    assert low == pytest.approx(d.mean() - reach * sd, abs=0.1 * sd)
    assert high == pytest.approx(d.mean() + reach * sd, abs=0.1 * sd)
    # Seeds or examples alone would be too sure.
    for alone in (d.mean(1).std() / math.sqrt(seeds), d.mean(0).std() / math.sqrt(examples)):
        assert high - low > 1.1 * 2 * reach * alone


@pytest.mark.parametrize("paired", [True, False])
def test_crossed_bootstrap_is_a_loop_over_drawn_runs_and_examples(paired):
    rng = np.random.default_rng(4)
    a = rng.random((5, 60)) < 0.8
    b = rng.random((5 if paired else 7, 60)) < 0.6
    draw = np.random.default_rng(5)
    means = []
    for _ in range(8000):
        columns = draw.integers(60, size=60)
        of_a = draw.integers(len(a), size=len(a))
        of_b = of_a if paired else draw.integers(len(b), size=len(b))
        means.append(a[of_a][:, columns].mean() - b[of_b][:, columns].mean())
    expected = np.quantile(means, [0.025, 0.975])
    ends = crossed_bootstrap(a, b, paired=paired, resamples=8000)
    np.testing.assert_allclose(ends, expected, atol=0.1 * np.std(means))  # both are sampled


def test_crossed_bootstrap_does_not_depend_on_its_chunks(monkeypatch):
    rng = np.random.default_rng(4)
    a, b = rng.random((3, 50)) < 0.8, rng.random((3, 50)) < 0.6
    whole = crossed_bootstrap(a, b, resamples=4000)
    monkeypatch.setattr("powergrad.lab.stats.CELLS", 5000)
    parts = crossed_bootstrap(a, b, resamples=4000)
    np.testing.assert_allclose(parts, whole, atol=0.03)  # other draws, the same law


@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=8),
    st.lists(st.integers(0, 5), min_size=2, max_size=8),
)
def test_probability_of_improvement_is_mann_whitney(arm, baseline):
    u = (
        stats.mannwhitneyu(arm, baseline, method="asymptotic").statistic
        if len(set(arm + baseline)) > 1
        else len(arm) * len(baseline) / 2
    )
    p, (low, high) = probability_of_improvement(arm, baseline, paired=False, resamples=200)
    assert p == pytest.approx(u / (len(arm) * len(baseline)), abs=1e-12)
    assert 0 <= low <= high <= 1
    q, _ = probability_of_improvement(
        arm, baseline, paired=False, higher_is_better=False, resamples=10
    )
    assert p + q == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("paired", [True, False])
def test_interval_of_the_probability_of_improvement_is_a_loop_over_drawn_seeds(paired):
    rng = np.random.default_rng(2)
    shared = rng.normal(0, 1, 7)
    a, b = shared + rng.normal(0.5, 0.3, 7), shared + rng.normal(0, 0.3, 7)
    draw = np.random.default_rng(3)
    values = []
    for _ in range(6000):
        i = draw.integers(7, size=7)
        j = i if paired else draw.integers(7, size=7)
        wins = a[i][:, None] > b[j][None, :]
        ties = a[i][:, None] == b[j][None, :]
        values.append((wins + ties / 2).mean())
    _, interval = probability_of_improvement(a, b, paired=paired, resamples=6000)
    np.testing.assert_allclose(interval, np.quantile(values, [0.025, 0.975]), atol=0.03)


# Power and planning ------------------------------------------------------------------------------


def test_least_seeds_is_the_formula_and_what_the_test_can_do():
    for m in range(1, 200):
        assert least_seeds(m) == math.ceil(math.log2(40 * m))
    for m in (1, 2, 3, 4, 10):
        n = least_seeds(m)
        assert m * float(sign_flip_test(np.ones(n))) < 0.05
        assert m * float(sign_flip_test(np.ones(n - 1))) >= 0.05
    assert least_seeds(1, 0.01) == 8


def test_with_six_seeds_all_must_agree():
    """Then the power is exactly the chance that six normal differences are positive."""
    assert detectable(1.0, 6) == pytest.approx(
        stats.norm.ppf(0.8 ** (1 / 6)),
        rel=0.01,  # 20,000 simulated studies
    )
    for effect in (0.5, 1.0, 2.0):
        assert detection_power(effect, 6) == pytest.approx(stats.norm.cdf(effect) ** 6, abs=0.01)


@pytest.mark.parametrize(("n", "comparisons"), [(7, 1), (9, 3), (11, 1), (12, 1), (13, 3)])
def test_detection_power_is_that_of_the_test_itself(n, comparisons):
    """By subset means, or by the noncentral t where these are many (12 and 13 here)."""
    effect = detectable(1.0, n, comparisons=comparisons)
    x = np.random.default_rng(n).normal(effect, 1, (4000, n))
    share = (sign_flip_test(x) * comparisons < 0.05).mean()
    assert share == pytest.approx(0.8, abs=0.025)  # 4 standard errors
    assert detection_power(-effect, n, comparisons=comparisons) == pytest.approx(0.8, abs=1e-3)


def test_fewer_seeds_than_least_detect_nothing():
    assert minimum_detectable_effect(1.0, 5) is None
    assert detection_power(100.0, 5) == 0
    assert detection_power(100.0, 6) == 1


def test_the_detectable_effect_shrinks_with_seeds_and_grows_with_comparisons():
    effects = [detectable(1.0, n) for n in range(6, 30)]
    assert all(a > b for a, b in pairwise(effects))
    assert detectable(1.0, 8, comparisons=3) > effects[2]
    assert detectable(0.25, 8) == pytest.approx(effects[2] / 4)


def test_settling_is_a_verdict_at_the_margin_and_at_zero():
    sd, margin = 0.4, 0.3
    n = seeds_to_settle(sd, margin)
    rng = np.random.default_rng(0)
    noise = rng.normal(0, sd, (2000, n))
    found = (sign_flip_test(noise[:400] + margin) < 0.05).mean()
    assert found >= 0.8 - 0.06  # 3 standard errors of 400 studies
    equivalent = np.mean([tost(d, margin) < 0.05 for d in noise])
    assert 0.8 - 0.03 <= equivalent <= 0.9
    fewer = rng.normal(0, sd, (2000, n - 3))
    assert np.mean([tost(d, margin) < 0.05 for d in fewer]) < 0.8
    assert seeds_to_settle(0.0, margin) == seeds_to_settle(1e-15, margin) == least_seeds()
    assert seeds_to_settle(sd, margin, comparisons=5) > n


def t_power_by_integration(effect, n):
    """Average the normal power over the law of the sample's standard deviation."""
    df, critical = n - 1, stats.t.isf(0.025, n - 1)

    def integrand(s):
        z = effect * math.sqrt(n)
        density = 2 * s * df * stats.chi2.pdf(df * s * s, df)
        return density * (stats.norm.cdf(z - critical * s) + stats.norm.cdf(-z - critical * s))

    return integrate.quad(integrand, 0, 12, limit=200)[0]


@pytest.mark.parametrize(("difference", "seeds"), [(0.09, 29), (0.14, 14), (0.30, 5)])
def test_seeds_of_the_papers_differences(difference, seeds):
    assert seeds_needed(difference, 0.118) == seeds
    assert seeds_needed(-difference, 0.118) == seeds
    effect = difference / (0.118 * math.sqrt(2))
    assert t_power_by_integration(effect, seeds) >= 0.8
    assert t_power_by_integration(effect, seeds - 1) < 0.8
    assert planning.t_power(effect * math.sqrt(seeds), seeds - 1, 0.05) == pytest.approx(
        t_power_by_integration(effect, seeds), abs=1e-7
    )
    result = plan(difference, "imagenet-resnet18")
    assert (result.t_seeds, result.seeds) == (seeds, max(seeds, 6))
    assert result.verdict_power >= 0.8


def test_correlated_runs_need_fewer_seeds():
    assert seeds_needed(0.09, 0.118, correlation=0.5) == seeds_needed(0.09, 0.118 / math.sqrt(2))
    assert seeds_needed(0.09, 0.118, power=0.9) > 29
    assert seeds_needed(0.09, 0.118, level=0.01) > 29


def test_a_plan_says_what_to_run_and_how_long():
    result = plan(0.30, 0.118, seconds=90, workers=4)
    assert (result.t_seeds, result.least_seeds, result.seeds, result.runs) == (5, 6, 6, 12)
    assert result.hours == 3 * 90 / 3600
    assert result.t_seeds_interval == (5, 5)  # a given sigma is taken as it is
    assert result.sentence == (
        "To find a difference of 0.3 at sigma 0.118 with 80% power a paired t test needs 5 seeds "
        "an arm. The verdict's test cannot speak with fewer than 6. Run 6: 12 runs, 4 minutes."
    )
    assert plan(0.30, 0.118, seconds=3600, workers=5).hours == 3  # the last round is not full
    several = plan(0.09, 0.118, comparisons=3)
    assert several.t_seeds == seeds_needed(0.09, 0.118, level=0.05 / 3)
    assert several.runs == 4 * several.seeds
    assert json.loads(json.dumps(several.to_dict(), allow_nan=False))["seeds"] == several.seeds


def test_a_small_study_plans_with_its_uncertainty():
    rng = np.random.default_rng(0)
    shared = rng.normal(97, 1, 8)  # what runs of one seed have in common cancels
    runs = dict(enumerate(shared + rng.normal(0.2, 0.1, 8)))
    baseline = dict(enumerate(shared + rng.normal(0, 0.1, 8)))
    noise = estimate_noise(runs, baseline)
    assert estimate_noise(runs).sigma > 3 * noise.sigma
    differences = [runs[i] - baseline[i] for i in range(8)]
    assert noise.sigma == pytest.approx(np.std(differences, ddof=1) / math.sqrt(2))
    low, high = noise.interval()
    result = plan(0.1, noise)
    assert result.t_seeds_interval == (seeds_needed(0.1, low), seeds_needed(0.1, high))
    assert result.t_seeds_interval[0] < result.t_seeds < result.t_seeds_interval[1]
    assert f"({result.t_seeds_interval[0]} to" in result.sentence


def test_the_interval_of_sigma_covers():
    sds = np.random.default_rng(0).normal(0, 0.3, (4000, 8)).std(1, ddof=1)
    ends = [Noise(float(sd), 8, "simulated").interval() for sd in sds]
    assert np.mean([low <= 0.3 <= high for low, high in ends]) == pytest.approx(0.95, abs=0.012)


def test_known_noise_has_its_source():
    assert KNOWN_NOISE["imagenet-resnet18"].sigma == 0.118
    assert KNOWN_NOISE["cifar10-resnet"].sigma == 0.149
    assert all("arXiv:2304.01910" in noise.source for noise in KNOWN_NOISE.values())


# Comparisons -------------------------------------------------------------------------------------

BASE = [97.2, 97.5, 96.9, 97.4, 97.1, 97.3, 97.0, 97.6]
NOISE = [0.05, -0.04, 0.02, -0.06, 0.03, 0.01, -0.02, 0.04]


def shifted(by, scale=1.0):
    return [b + by + scale * e for b, e in zip(BASE, NOISE, strict=True)]


def test_each_verdict():
    values = study(
        baseline=BASE, up=shifted(0.5), down=shifted(-0.5), same=shifted(0), wild=shifted(0, 20)
    )
    results = compare(values, "baseline", margin=0.2)
    assert [r.arm for r in results] == ["up", "down", "same", "wild"]
    assert [r.verdict for r in results] == ["better", "worse", "equivalent", "underpowered"]
    swapped = compare(values, "baseline", margin=0.2, higher_is_better=False)
    assert [r.verdict for r in swapped] == ["worse", "better", "equivalent", "underpowered"]
    for r, s in zip(results, swapped, strict=True):
        assert r.difference == s.difference
        assert r.probability_of_improvement == pytest.approx(1 - s.probability_of_improvement)


def test_a_comparison_has_the_numbers_of_its_parts():
    values = study(baseline=BASE, pgt=shifted(0.1, 3), agc=shifted(-0.02, 2))
    a, b = np.array(shifted(0.1, 3)), np.array(BASE)
    first, second = compare(values, "baseline", margin=0.2, alpha_level=0.1)
    d = a - b
    p = [float(sign_flip_test(d)), float(sign_flip_test(np.array(shifted(-0.02, 2)) - b))]
    assert [first.p, second.p] == p
    assert [first.p_adjusted, second.p_adjusted] == holm(p).tolist()
    assert first.difference == pytest.approx(d.mean())
    assert first.interval == pytest.approx(t_interval(d, 0.1))
    assert first.tost_p == pytest.approx(tost(d, 0.2))
    assert first.welch_p == pytest.approx(stats.ttest_ind(a, b, equal_var=False).pvalue)
    assert first.mde == pytest.approx(
        detectable(d.std(ddof=1), 8, comparisons=2, level=0.1, step=0.01)
    )
    assert first.seeds_needed == seeds_to_settle(
        float(d.std(ddof=1)), 0.2, comparisons=2, level=0.1, step=0.01
    )
    assert (first.n, first.dropped, first.comparisons, first.paired) == (8, 0, 2, True)


def test_the_order_of_seeds_does_not_matter():
    values = study(baseline=BASE, pgt=shifted(0.05, 3))
    turned = {arm: dict(reversed(of.items())) for arm, of in values.items()}
    turned["pgt"] = values["pgt"]
    (a,), (b,) = (compare(v, "baseline", margin=0.2) for v in (values, turned))
    assert (a.p, a.verdict) == (b.p, b.verdict)
    assert a.interval == pytest.approx(b.interval)


def test_sentences():
    def sentence(**kwargs):
        arm = kwargs.pop("arm")
        values = study(baseline=BASE[: len(arm)], pgt=arm)
        kwargs = {"margin": 0.2, "metric": "points of test accuracy", **kwargs}
        return compare(values, "baseline", **kwargs)[0].sentence

    assert sentence(arm=shifted(0.5)) == (
        "pgt is better than baseline: +0.504 points of test accuracy "
        "(95% interval +0.471 to +0.537, p = 0.0078, n = 8)."
    )
    assert sentence(arm=shifted(0.1)).endswith("The difference is smaller than the margin of 0.2.")
    assert sentence(arm=shifted(0)) == (
        "pgt is equivalent to baseline within 0.2 points of test accuracy: +0.004 "
        "(95% interval -0.029 to +0.037, two one-sided tests p < 0.001, n = 8)."
    )
    assert sentence(arm=shifted(0, 20)) == (
        "pgt against baseline is underpowered: +0.07 points of test accuracy "
        "(95% interval -0.59 to +0.74, p = 0.86, n = 8). With 8 seeds a difference of 0.96 or "
        "more is found with 80% power; 136 seeds would settle it for a margin of 0.2."
    )
    assert "pgt is better than baseline: -0.504 nll" in sentence(
        arm=[2 * b - s for b, s in zip(BASE, shifted(0.5), strict=True)],
        higher_is_better=False,
        metric="nll",
    )


def test_too_few_seeds_are_underpowered_whatever_they_show():
    for by in (0.0, 5.0):  # equivalent and better, were there more
        (r,) = compare(study(baseline=BASE[:5], pgt=shifted(by)[:5]), "baseline", margin=0.2)
        assert (r.verdict, r.mde) == ("underpowered", None)
        assert (
            "With 1 comparison the test needs at least 6 seeds to reach p < 0.05, and there are 5"
            in (r.sentence)
        )
    arms = {f"arm{i}": shifted(5.0)[:6] for i in range(2)}
    results = compare(study(baseline=BASE[:6], **arms), "baseline", margin=0.2)
    assert [r.verdict for r in results] == ["underpowered"] * 2
    assert "With 2 comparisons the test needs at least 7 seeds" in results[0].sentence


def test_identical_arms_are_equivalent():
    (r,) = compare(study(baseline=BASE, pgt=BASE), "baseline", margin=0.01)
    assert (r.verdict, r.p, r.tost_p, r.welch_p, r.mde) == ("equivalent", 1, 0, 1, 0)
    assert r.interval == (0, 0)
    assert r.probability_of_improvement == 0.5


def test_a_constant_shift_is_certain():
    for n in (6, 7, 8):
        base = [0.1, 0.2, 0.3, 0.5, 0.7, 0.6, 0.4, 0.9][:n]
        values = study(baseline=base, pgt=[b + 0.1 for b in base])  # equal but for rounding
        (r,) = compare(values, "baseline", margin=0.3)
        assert r.verdict == "better"
        assert r.sentence.startswith("pgt is better than baseline: +0.100 (95% interval +0.100")


def test_rounding_is_not_a_difference():
    values = study(baseline=[0.1 + 0.2] * 8, pgt=[0.3] * 8)  # they differ in the last bit
    (r,) = compare(values, "baseline", margin=0.01)
    assert (r.verdict, r.p) == ("equivalent", 1)


def test_seeds_without_a_partner_are_left_out_and_said():
    values = study(baseline=BASE, pgt=shifted(0.5))
    values["pgt"].pop(3)
    values["pgt"][11] = 0.0
    (r,) = compare(values, "baseline", margin=0.2)
    kept = [i for i in range(8) if i != 3]
    expected = np.mean([shifted(0.5)[i] - BASE[i] for i in kept])
    assert (r.n, r.dropped, r.paired) == (7, 2, True)
    assert r.difference == pytest.approx(expected)
    assert r.sentence.endswith("2 runs without a partner of the same seed left out.")


def test_arms_that_share_no_seeds_are_compared_by_welch():
    a, b = np.array(shifted(0.5, 2)), np.array(BASE[:6])
    values = {"baseline": dict(enumerate(b)), "pgt": dict(enumerate(a, 100))}
    (r,) = compare(values, "baseline", margin=0.2)
    reference = stats.ttest_ind(a, b, equal_var=False)
    assert r.p == r.welch_p == pytest.approx(reference.pvalue)
    interval = reference.confidence_interval(0.95)
    assert r.interval == pytest.approx((interval.low, interval.high))
    assert (r.paired, r.n, r.dropped, r.verdict) == (False, 6, 0, "better")
    assert r.sentence.endswith("so Welch's test decides.")
    # A shift of the minimum detectable effect is found by Welch's test in four of five.
    rng = np.random.default_rng(0)
    scale = np.sqrt((a.var(ddof=1) / 8 + b.var(ddof=1) / 6) / (1 / 8 + 1 / 6))
    assert r.mde is not None
    x, y = rng.normal(r.mde, scale, (4000, 8)), rng.normal(0, scale, (4000, 6))
    found = stats.ttest_ind(x, y, axis=1, equal_var=False).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.04)


def test_examples_give_the_crossed_bootstrap():
    rng = np.random.default_rng(0)
    right = {
        arm: {seed: 100.0 * (rng.random(360) < rate) for seed in range(6)}
        for arm, rate in {"baseline": 0.95, "pgt": 0.97}.items()
    }
    values = {arm: {seed: float(x.mean()) for seed, x in of.items()} for arm, of in right.items()}
    (r,) = compare(values, "baseline", margin=0.5, examples=right)
    matrices = [np.stack(list(right[arm].values())) for arm in ("pgt", "baseline")]
    assert r.bootstrap_interval == crossed_bootstrap(*matrices)
    fractions = {arm: {seed: x / 100 for seed, x in of.items()} for arm, of in right.items()}
    with pytest.raises(ValueError, match="'pgt' at seed 0 to average to its metric"):
        compare(values, "baseline", margin=0.5, examples=fractions)
    del right["pgt"][2]
    with pytest.raises(ValueError, match="to have seed 2 of 'pgt'"):
        compare(values, "baseline", margin=0.5, examples=right)


def test_a_comparison_is_json():
    values = study(baseline=BASE, pgt=shifted(0.5))
    values["few"] = {i: shifted(0.1)[i] for i in range(4)}
    few = compare(values, "baseline", margin=0.2)[1]
    assert few.to_dict()["mde"] is None
    for r in compare(values, "baseline", margin=0.2):
        read = json.loads(json.dumps(r.to_dict(), allow_nan=False))
        assert read["verdict"] == r.verdict
        assert read["sentence"] == r.sentence
        assert read["interval"] == list(r.interval)


# Bad input ---------------------------------------------------------------------------------------

GOOD = study(baseline=BASE, pgt=shifted(0.5))


@pytest.mark.parametrize(
    ("values", "baseline", "kwargs", "message"),
    [
        ({}, "baseline", {}, "a baseline and at least one other arm, but got none"),
        (study(baseline=BASE), "baseline", {}, "at least one other arm, but got 'baseline'"),
        (GOOD, "base", {}, "`baseline` to be one of 'baseline', 'pgt', but got 'base'"),
        (study(a=BASE, b=[1.0]), "a", {}, "at least 2 seeds an arm, but got 1 of 'b'"),
        (study(a=BASE, b=[1.0, math.nan]), "a", {}, "'b' at seed 1 to be finite, but got nan"),
        (study(a=[1.0, math.inf], b=BASE), "a", {}, "'a' at seed 1 to be finite, but got inf"),
        (GOOD, "baseline", {"margin": 0.0}, "`margin` to be positive and finite, but got 0.0"),
        (GOOD, "baseline", {"margin": math.nan}, "`margin` to be positive and finite, but got nan"),
        (GOOD, "baseline", {"alpha_level": 1}, "`alpha_level` to be between 0 and 1, but got 1"),
        (GOOD, "baseline", {"power": 0}, "`power` to be between 0 and 1, but got 0"),
    ],
)  # fmt: skip
def test_bad_comparisons(values, baseline, kwargs, message):
    with pytest.raises(ValueError, match=message):
        compare(values, baseline, **{"margin": 0.2, **kwargs})


def test_metrics_that_are_no_numbers():
    with pytest.raises(TypeError, match="'pgt' at seed 0 to be a number, but got 'high'"):
        compare({**GOOD, "pgt": {0: "high", 1: 2.0}}, "baseline", margin=0.2)  # pyright: ignore


def test_rows_become_arms_and_a_seed_twice_is_an_error():
    rows = [("pgt", 1, 0.5), ("baseline", 1, 0.25), ("pgt", 0, 0.75)]
    assert by_arm_and_seed(rows) == {"pgt": {1: 0.5, 0: 0.75}, "baseline": {1: 0.25}}
    with pytest.raises(ValueError, match="each seed once an arm, but got seed 1 twice in 'pgt'"):
        by_arm_and_seed([*rows, ("pgt", 1, 0.5)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sign_flip_test([]), "`differences` to hold values, but got shape"),
        (lambda: sign_flip_test([1.0, math.nan]), "`differences` to be finite, but got nan"),
        (lambda: holm([0.5, 1.5]), "`p_values` to be in"),
        (lambda: t_interval([1.0]), "`differences` to be 2 values or more"),
        (lambda: t_interval([1.0, 2.0], level=0), "`level` to be between 0 and 1"),
        (lambda: tost([1.0, 2.0], -1), "`margin` to be positive"),
        (lambda: welch([1.0], [1.0, 2.0]), "`arm` to be 2 values or more"),
        (lambda: probability_of_improvement([1, 2], [1, 2, 3]), "paired values"),
        (lambda: crossed_bootstrap(np.ones((2, 5)), np.ones((3, 5))), "same examples and seeds"),
        (lambda: crossed_bootstrap(np.ones((2, 5)), np.ones((2, 4))), "but got .2, 5. and .2, 4."),
        (lambda: least_seeds(0), "`comparisons` to be at least 1"),
        (lambda: detection_power(1.0, 1), "`n` to be at least 2"),
        (lambda: detectable(-1.0, 8), "`sd` to be finite and not negative"),
        (lambda: minimum_detectable_effect(1.0, 8, step=-0.1), "`step` to be finite and not"),
        (lambda: compare(GOOD, "baseline", margin=0.2, step=math.nan), "`step` to be finite"),
        (lambda: seeds_to_settle(1.0, 0.0), "`margin` to be positive"),
        (lambda: seeds_needed(0.0, 0.1), "`difference` to be positive and finite"),
        (lambda: seeds_needed(0.1, 0.0), "`sigma` to be positive"),
        (lambda: seeds_needed(0.1, 0.1, correlation=1.0), "`correlation` to be in"),
        (lambda: plan(0.1, "imagenet"), "one of 'imagenet-resnet18', 'cifar10-resnet', but got"),
        (lambda: plan(0.1, 0.1, workers=0), "`workers` to be positive"),
        (lambda: plan(0.1, 0.1, seconds=-1), "`seconds` to be positive"),
        (lambda: estimate_noise({0: 1.0}), "2 seeds or more to use, but got 1"),
        (lambda: estimate_noise({0: 1.0, 1: 2.0}, {1: 1.0}), "2 seeds or more to use, but got 1"),
        (lambda: estimate_noise({0: 1.0, 1: 1.0}), "deviation` to be positive"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("comparisons", [1, 3])
@pytest.mark.parametrize("difference", [0.09, 0.14, 0.25, 0.3])
def test_a_plan_has_the_power_that_it_promises(difference, comparisons):
    made = plan(difference, 0.118, comparisons=comparisons)
    assert made.verdict_power >= 0.8
    assert f"Run {made.seeds}:" in made.sentence
    effect = difference / (0.118 * math.sqrt(2))
    assert made.verdict_power == detection_power(effect, made.seeds, comparisons=comparisons)
    fewer = detection_power(effect, made.seeds - 1, comparisons=comparisons)
    assert fewer < 0.8 or made.seeds == max(made.t_seeds, made.least_seeds)
