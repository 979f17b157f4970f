"""The statistics of a comparison, against scipy, against enumeration, and by simulated studies."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from powergrad.lab.stats import (
    DEFAULT,
    LEAST,
    Design,
    Noise,
    Second,
    compare,
    error_of_looks,
    estimate_noise,
    parse_runs,
    plan,
    t_interval,
)
from powergrad.lab.stats.power import judge, runs_to_settle, simulate
from powergrad.lab.stats.settle import Arm, Rule, settle
from powergrad.lab.stats.tests import failure_bound, permutation_p, should_pair, step_of, welch

stats: Any = scipy_stats  # its results are typed as less than they are

FIXED = Design((8,))
MARGIN = 0.5


def seeded(values):
    return dict(enumerate(values))


def one(arm, baseline, **options):
    options = {"margin": MARGIN, **options}
    (found,) = compare({"base": seeded(baseline), "arm": seeded(arm)}, "base", **options)
    return found


def inside(looks, levels):
    """The chance that no look rejects at its level, by the joint normal distribution."""
    n = np.array(looks, float)
    correlation = np.sqrt(np.minimum.outer(n, n) / np.maximum.outer(n, n))
    joint = stats.multivariate_normal(np.zeros(len(n)), correlation, abseps=1e-6)
    bounds = stats.norm.isf(np.array(levels) / 2)
    return joint.cdf(bounds, lower_limit=-bounds, rng=np.random.default_rng(0))


@pytest.mark.parametrize("looks", [(8, 12, 16, 20, 24), (8, 24), (6, 7, 40)])
@pytest.mark.parametrize("comparisons", [1, 3, 8])
def test_each_look_spends_its_share_of_the_error(looks, comparisons):
    design = Design(looks)
    each = 1 - 0.95 ** (1 / comparisons)
    levels = [design.nominal(look, comparisons) for look in range(len(looks))]
    for k, n in enumerate(looks, start=1):
        spent = 1 - inside(looks[:k], levels[:k])
        assert spent == pytest.approx(each * n / looks[-1], abs=2e-5)


@settings(max_examples=30, deadline=None)
@given(p=st.floats(1e-9, 0.999), look=st.integers(0, 4), comparisons=st.integers(1, 9))
def test_the_corrected_p_is_below_the_level_where_the_look_rejects(p, look, comparisons):
    overall = DEFAULT.overall(p, look, comparisons)
    nominal = DEFAULT.nominal(look, comparisons)
    assert 0 <= overall <= 1
    if abs(p - nominal) > 1e-9:
        assert (overall < DEFAULT.level) == (p < nominal)
    assert DEFAULT.overall(nominal, look, comparisons) == pytest.approx(0.05, abs=1e-6)
    assert DEFAULT.overall(p / 2, look, comparisons) <= overall


@pytest.mark.parametrize(("looks", "comparisons"), [((8, 16), 1), ((8, 16), 3), ((6, 8, 12), 2)])
def test_the_error_of_unplanned_looks_is_that_of_all_of_them_together(looks, comparisons):
    each = 1 - 0.95 ** (1 / comparisons)
    crossed = 1 - inside(looks, [each] * len(looks))
    expected = 1 - (1 - crossed) ** comparisons
    assert error_of_looks(looks, comparisons) == pytest.approx(expected, abs=1e-4)
    assert error_of_looks(looks[:1], comparisons) == pytest.approx(0.05)


def test_designs_are_written_as_they_are_read():
    assert parse_runs("8..24") == DEFAULT.looks == (8, 12, 16, 20, 24)
    assert parse_runs("8..26") == (8, 12, 16, 20, 24, 26)
    assert parse_runs("1..3") == (1, 2, 3)
    for text in ("8..24", "12", "8,20", "6,7,9"):
        assert str(Design(parse_runs(text))) == text


@pytest.mark.parametrize("text", ["", "x", "0", "8..", "24..8", "8,8", "-3", "8..8..9", "2.5"])
def test_a_design_that_is_none(text):
    with pytest.raises(ValueError, match=r"as 12, 8\.\.24 or 8,16,24, but got"):
        parse_runs(text)


@pytest.mark.parametrize(("n", "k"), [(2, 2), (8, 8), (8, 5), (30, 24)])
def test_welch_is_scipys(n, k):
    rng = np.random.default_rng(n)
    a, b = rng.normal(0.4, 2, (7, n)), rng.normal(0, 1, (7, k))
    found = welch(a, b)
    expected = stats.ttest_ind(a, b, equal_var=False, axis=1)
    np.testing.assert_allclose(found.p(), expected.pvalue, rtol=1e-12)
    np.testing.assert_allclose(found.df, expected.df, rtol=1e-12)
    interval = expected.confidence_interval(0.9)
    np.testing.assert_allclose(found.mean - found.reach(0.1), interval.low, rtol=1e-10)
    np.testing.assert_allclose(found.mean + found.reach(0.1), interval.high, rtol=1e-10)


@given(
    st.lists(st.integers(-5, 5), min_size=2, max_size=4),
    st.lists(st.integers(-5, 5), min_size=2, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_the_permutation_test_counts_divisions(arm, baseline):
    runs = np.array([*arm, *baseline], float)
    n = len(arm)
    observed = abs(np.mean(arm) - np.mean(baseline))
    reached = total = 0
    for chosen in itertools.combinations(range(len(runs)), n):
        rest = np.delete(runs, chosen)
        reached += abs(runs[list(chosen)].mean() - rest.mean()) >= observed - 1e-9
        total += 1
    assert permutation_p(tuple(arm), tuple(baseline)) == pytest.approx(reached / total)


@pytest.mark.parametrize(("failures", "runs"), [(0, 8), (1, 8), (3, 24), (7, 8)])
def test_the_bound_of_failures_is_clopper_and_pearsons(failures, runs):
    test = stats.binomtest(failures, runs, alternative="less")
    assert failure_bound(failures, runs) == pytest.approx(test.proportion_ci(0.95).high)
    assert failure_bound(runs, runs) == 1


def test_metrics_in_steps_are_noticed():
    rng = np.random.default_rng(0)
    values = 100 * rng.integers(330, 360, 40) / 360
    assert step_of(values.tolist()) == pytest.approx(100 / 360)
    assert step_of(rng.normal(size=40).tolist()) == 0
    assert step_of([98.0, 98.0]) == step_of([]) == 0
    same, step = [98.0] * 8, 100 / 360  # it is not taken to vary less than by its rounding
    assert welch(same, same).error == 0
    assert welch(same, same, step=step).error == pytest.approx(math.sqrt(2 * step**2 / 12 / 8))


@pytest.mark.parametrize("n", [2, 3, 8, 30])
def test_t_interval_is_scipys(n):
    values = np.random.default_rng(n).normal(size=n)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert t_interval(values) == pytest.approx((expected.low, expected.high))


@settings(max_examples=60, deadline=None)
@given(
    effect=st.floats(-1.5, 1.5),
    sigma=st.floats(0.05, 1.0),
    n=st.integers(2, 26),
    arms=st.integers(1, 4),
    is_planned=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_interval_p_and_verdict_never_contradict_each_other(
    effect, sigma, n, arms, is_planned, seed
):
    rng = np.random.default_rng(seed)
    values = {"base": seeded(rng.normal(98, sigma, n))}
    values |= {f"arm{i}": seeded(rng.normal(98 + effect, sigma, n)) for i in range(arms)}
    design = DEFAULT if is_planned else None
    for found in compare(values, "base", margin=MARGIN, design=design):
        low, high = found.interval
        assert low <= found.difference <= high
        can_speak = found.n >= LEAST and found.n >= found.looks[0]
        is_different, is_inside = not low <= 0 <= high, low > -MARGIN and high < MARGIN
        matters = abs(found.difference) > MARGIN or found.n == found.looks[-1]
        says_so = found.verdict in ("better", "worse")
        assert says_so == (can_speak and is_different and matters)
        assert (found.verdict == "equivalent") == (can_speak and is_inside and not says_so)
        if can_speak:
            assert is_different == (found.p < 0.05)
        if found.verdict == "better":
            assert low > 0
        if found.verdict == "worse":
            assert high < 0
        assert found.is_open == (found.verdict == "not settled" and found.n < found.looks[-1])
        assert found.sentence


def test_without_a_design_it_is_welchs_test_of_all_runs_with_sidaks_correction():
    rng = np.random.default_rng(3)
    values = {name: seeded(rng.normal(m, 0.4, n)) for name, m, n in (("x", 0.4, 9), ("y", 1, 8))}
    values["b"] = dict(enumerate(rng.normal(0, 0.4, 16), start=20))  # no seed is shared
    for found in compare(values, "b", margin=MARGIN):
        samples = [[*values[arm].values()] for arm in (found.arm, "b")]
        assert (found.n, found.n_baseline) == tuple(map(len, samples))
        test = stats.ttest_ind(*samples, equal_var=False)
        assert found.p_alone == pytest.approx(test.pvalue)
        assert found.p == pytest.approx(1 - (1 - test.pvalue) ** 2)
        interval = test.confidence_interval(math.sqrt(0.95))
        assert found.interval == pytest.approx((interval.low, interval.high))


def test_an_arm_is_judged_where_it_settles_and_later_runs_change_nothing():
    rng = np.random.default_rng(0)
    base, arm = rng.normal(98, 0.2, 24), rng.normal(99, 0.2, 24)
    early = one(arm[:8], base[:8], design=DEFAULT)
    late = one(np.r_[arm[:8], arm[8:] - 5], base, design=DEFAULT)
    assert early.verdict == "better"
    assert early == replace(late, step=early.step)
    assert (late.n, late.n_baseline) == (8, 8)


def test_luck_does_not_choose_between_better_and_equivalent():
    outcome = simulate(0.6, 0.55, DEFAULT, margin=1.5, comparisons=4)
    assert outcome.equivalent == pytest.approx(0.98, abs=0.01)  # docs/methods/statistics.md
    assert outcome.found == pytest.approx(0.02, abs=0.01)
    assert outcome.runs == pytest.approx(11.6, abs=0.1)
    fixed = simulate(0.6, 0.1, Design((24,)), margin=1.5)  # with a single look, it is not 0
    assert fixed.found == 1


def test_an_arm_waits_for_the_next_look():
    rng = np.random.default_rng(1)
    base, arm = rng.normal(98, 0.4, 24), rng.normal(98, 0.4, 24)
    for n, seen in ((3, 3), (8, 8), (11, 8), (12, 12)):
        found = one(arm[:n], base[:n], design=DEFAULT)
        assert found.n == seen
        assert found.is_open
    assert "3 of 8 runs are finished" in one(arm[:3], base[:3], design=DEFAULT).sentence
    assert math.isinf(one(arm[:3], base[:3], design=DEFAULT).interval[0])


def test_the_runs_of_a_look_are_those_of_the_smallest_seeds():
    rng = np.random.default_rng(1)
    base, arm = rng.normal(98, 0.4, 12), rng.normal(98, 0.4, 12)
    order = rng.permutation(12)
    shuffled = {int(seed): float(arm[seed]) for seed in order}
    (found,) = compare(
        {"base": seeded(base), "arm": shuffled}, "base", margin=MARGIN, design=Design((8, 20))
    )
    assert found.difference == pytest.approx(arm[:8].mean() - base[:8].mean())


def test_runs_without_any_spread_have_no_verdict():
    found = one([99.123456] * 2, [98.7] * 2, step=0.0)
    assert found.verdict == "not settled"
    assert "give the same number, so their noise is unknown" in found.sentence
    rng = np.random.default_rng(0)
    some = rng.normal(98, 0.1, 24).tolist()
    rounded = [0.3] * 4 + [0.1 + 0.2] * 4
    for arm, baseline in (
        ([98.0] * 8, [98.0] * 8),
        ([99.0] * 8, [98.0] * 8),  # a program that ignores its seed
        (rounded, [0.1 + 0.2] * 8),
        ([90.0] * 8, some[:8]),
        (some[:8], [90.0] * 8),
    ):
        for design in (Design((8,)), DEFAULT):
            found = one(arm, baseline, design=design)
            assert found.verdict == "not settled"
            assert not found.is_open  # nothing is learned from more such runs
            assert math.isinf(found.interval[0])
            assert found.p == 1
            assert "so their noise is unknown" in found.sentence
    lost = one([10.0] * 8, some[:8], diverged={"arm": range(8)})  # chance is no accident
    assert lost.verdict == "worse"


def test_an_arm_equal_to_the_baseline_at_every_seed_has_no_effect():
    base = np.random.default_rng(0).normal(98, 3, 8)
    found = one(base, base, design=DEFAULT)
    assert (found.verdict, found.by, found.interval) == ("equivalent", "identity", (0, 0))
    assert "without effect" in found.sentence
    assert one(base[::-1], base, design=DEFAULT).is_open  # at other seeds
    assert one(base[:3], base[:3], design=DEFAULT).is_open


def failing(arm, baseline, failed=(), failed_baseline=(), **options):
    """The comparison of runs of which some failed."""
    lost = {"arm": set(failed), "base": set(failed_baseline)}
    values = {"base": seeded(baseline), "arm": seeded(arm)}
    values = {
        name: {seed: value for seed, value in runs.items() if seed not in lost[name]}
        for name, runs in values.items()
    }
    options = {"margin": MARGIN, "failed": lost, **options}
    (found,) = compare(values, "base", **options)
    return found


@pytest.mark.parametrize("design", [FIXED, DEFAULT, None], ids=str)
def test_failures_are_outcomes_of_their_own(design):
    base = 98 + 0.1 * np.random.default_rng(4).standard_normal(8)
    arm = base[::-1] + 0.01

    def verdict(arm, failed, failed_baseline=()):
        found = failing(arm, base, failed, failed_baseline, design=design)
        assert (found.failed, found.failed_baseline) == (len(failed), len(failed_baseline))
        assert found.done == 8
        return found.verdict, found.by

    every = range(8)
    assert verdict(arm, []) == ("equivalent", "mean")
    assert verdict(arm, every) == ("worse", "failures")
    assert verdict(arm, [], every) == ("better", "failures")
    assert verdict(arm + 1, every[1:]) == ("worse", "failures")
    assert verdict(arm, every, every) == ("not settled", "mean")
    assert verdict(arm, [3]) == ("not settled", "failures")
    assert verdict(arm + 1, [3]) == ("not settled", "failures")  # never better, either
    assert verdict(arm - 1, [3]) == ("worse", "mean")
    assert verdict(arm - 1, [], [3]) == ("not settled", "failures")
    assert verdict(arm + 1, [2], [3, 4]) == ("better", "mean")
    assert verdict(arm, [2], [3]) == ("equivalent", "mean")
    assert "more runs of arm failed" in failing(arm, base, [3], design=design).sentence
    assert "more runs of base failed" in failing(arm - 1, base, [], [3], design=design).sentence
    gone = failing(arm, base, every, design=design)
    p = stats.fisher_exact([[8, 0], [0, 8]]).pvalue
    assert gone.p == pytest.approx(design.overall(p, 0, 2) if design else 1 - (1 - p) ** 2)
    assert "8 of 8 runs failed, so up to 100% might" in gone.sentence


def test_an_arm_that_failed_more_often_gets_more_runs():
    base = 98 + 0.1 * np.random.default_rng(4).standard_normal(12)
    assert failing(base[:8] + 1, base[:8], [3], design=DEFAULT).is_open
    assert failing(base + 1, base, [3], [9], design=DEFAULT).verdict == "better"


def correlated(rng, correlation, shape):
    """Standard normal numbers of (..., arms, runs): the runs of one seed are correlated."""
    own = rng.standard_normal(shape)
    shared = rng.standard_normal((*shape[:-2], 1, shape[-1]))
    return math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own


def test_runs_are_paired_if_their_correlation_shows_that_it_pays():
    rng = np.random.default_rng(1)
    base, arm = correlated(rng, 0.99, (2, 24))
    for design in (FIXED, DEFAULT, None):
        found = one(arm[:8] + 0.3, base[:8], design=design, pairs=True, margin=0.05)
        assert (found.verdict, found.pairs) == ("better", 8)
        r, p = stats.pearsonr(arm[:8], base[:8]).statistic, stats.ttest_rel(arm[:8] + 0.3, base[:8])
        assert found.correlation == pytest.approx(r)
        assert found.p_alone == pytest.approx(p.pvalue)
        level = 1 - (design or FIXED).nominal(0, 1)
        assert found.interval == pytest.approx(tuple(p.confidence_interval(level)))
        assert "8 pairs of runs" in found.sentence
        assert one(arm[:8] + 0.3, base[:8], design=design, margin=0.05).pairs == 0
    # It is decided at the first look, whatever the later runs show.
    late = one(np.r_[arm[:8], -arm[8:]], base, design=DEFAULT, pairs=True, margin=0.01)
    assert (late.n, late.pairs) == (24, 24)
    assert late.correlation == pytest.approx(r)
    few = failing(arm + 0.1, base, [0, 1], [1, 2], design=Design((24,)), pairs=True)
    assert (few.n, few.n_baseline, few.pairs) == (22, 22, 21)


@pytest.mark.parametrize(("pairs", "critical"), [(6, 0.882), (8, 0.789), (24, 0.472)])
def test_correlations_that_pay_are_significant_at_one_per_cent(pairs, critical):
    """The critical values of Pearson's correlation, one-sided, as in printed tables."""
    assert not should_pair(critical - 0.001, pairs)
    assert should_pair(critical + 0.001, pairs)


def test_known_noise_needs_two_runs():
    noise = Noise(0.1, 0, source="from a table")
    found = one([98.5, 98.6], [98.0, 98.1], noise=noise, design=Design((2,)))
    assert found.verdict == "better"
    reach = 1.959964 * 0.1  # times the square root of 1/2 + 1/2
    assert found.interval == pytest.approx((0.5 - reach, 0.5 + reach))
    assert "known noise 0.1 from a table" in found.sentence
    estimated = one([98.5, 98.6], [98.0, 98.1], noise=Noise(0.1, 9, 8), design=Design((2,)))
    reach = stats.t.isf(0.025, 8) * 0.1
    assert estimated.interval == pytest.approx((0.5 - reach, 0.5 + reach))
    assert one([98.5, 98.6], [98.0, 98.1], design=Design((2,))).verdict == "not settled"
    wild = one([98.5, 99.6], [98.0, 97.1], noise=noise, design=Design((2,)))
    assert "vary by 0.71, which is more than the known noise" in wild.sentence
    assert "more than" not in found.sentence


def test_target_replaces_the_baseline():
    runs = 3.28 + 0.01 * np.random.default_rng(2).standard_normal((2, 8))
    values = {"base": seeded(runs[0]), "low": seeded(runs[1] - 0.02)}
    options = {"margin": 0.01, "target": 3.28, "higher_is_better": False, "design": FIXED}
    at, low = compare(values, "base", **options)
    assert (at.verdict, low.verdict) == ("not settled", "better")  # never equivalent
    level = 0.95**0.5
    expected = stats.ttest_1samp(runs[1] - 0.02, 3.28).confidence_interval(level)
    assert low.interval == pytest.approx(tuple(np.array(expected) - 3.28))
    assert low.sd == pytest.approx(runs[1].std(ddof=1))
    assert "low is better than the target 3.28" in low.sentence
    assert "margin" not in low.sentence
    assert compare({"a": values["low"]}, "a", **options)[0].verdict == "better"
    fails = compare(values, "base", failed={"low": [-1]}, **options)[1]
    assert (fails.verdict, fails.by) == ("not settled", "failures")  # not reached by every run


def test_two_metrics_share_the_error():
    rng = np.random.default_rng(3)
    values = {"base": seeded(rng.normal(98, 0.1, 8)), "arm": seeded(rng.normal(98, 0.1, 8))}
    seconds = {"base": seeded(rng.normal(60, 1, 8)), "arm": seeded(rng.normal(50, 1, 8))}
    slower = {"base": seconds["arm"], "arm": seconds["base"]}

    def verdict(seconds, shift=0.0, claim: Any = "better", margin=0.0):
        second = Second(seconds, claim, margin, False, "seconds")
        runs = {**values, "arm": {seed: value + shift for seed, value in values["arm"].items()}}
        (found,) = compare(runs, "base", margin=MARGIN, design=FIXED, second=second)
        assert found.comparisons == 2
        level = 0.95**0.5
        for part, (a, b) in ((found, runs.values()), (found.second, seconds.values())):
            test = stats.ttest_ind([*b.values()], [*a.values()], equal_var=False)
            assert part
            assert part.interval == pytest.approx(tuple(test.confidence_interval(level)))
        assert found.sentence
        return found.verdict

    assert verdict(seconds) == "better"  # faster at equal quality
    assert verdict(seconds, -0.2) == "better"  # worse, but by less than the margin
    assert verdict(seconds, -1) == "worse"
    assert verdict(slower) == "worse"
    assert verdict(slower, 1) == "worse"
    same = {"base": seconds["base"], "arm": seeded(reversed(seconds["base"].values()))}
    assert verdict(same) == "not settled"
    assert verdict(same, 1) == "not settled"
    assert verdict(same, 0, "better", 5.0) == "equivalent"
    assert verdict(same, 1, "not worse", 5.0) == "better"
    assert verdict(same, 0, "not worse", 5.0) == "equivalent"
    assert verdict(slower, 1, "not worse", 5.0) == "worse"
    assert verdict(slower, 1, "not worse", 20.0) == "better"


@pytest.mark.parametrize("design", [Design((6,)), DEFAULT], ids=str)
@pytest.mark.parametrize(
    "kind", ["correlated", "known", "estimated", "two runs", "target", "two metrics", "failures"]
)
def test_new_kinds_of_false_verdicts_are_as_rare_as_promised(kind, design):
    """The same, with 10,000 studies of more kinds, is `benchmarks/verdicts.py`."""
    rng, studies, arms = np.random.default_rng(6), 600, 2
    rules = [Rule(MARGIN, pairs=True)]
    noise = 0.4 * correlated(rng, 0.8, (studies, 2, arms + 1, design.last))
    failed = rng.random((studies, arms + 1, design.last)) < 0.3 * (kind == "failures")
    if kind in ("known", "estimated", "two runs"):
        noise = 0.4 * rng.standard_normal(noise.shape)
        rules = [Rule(MARGIN, noise=Noise(0.4, 0))]
        design = Design((2, 3, 4)) if kind == "two runs" else design
    if kind == "target":
        rules = [Rule(MARGIN, target=0.0)]
    if kind == "two metrics":
        rules = [Rule(0.1, claim="not worse"), Rule(0.0, claim="better")]
    wrong = 0
    for study in range(studies):
        if kind == "estimated":
            earlier = 0.4 * rng.standard_normal(9)
            rules = [Rule(MARGIN, noise=Noise(float(earlier.std(ddof=1)), 9, 8))]
        made = []
        for arm in range(arms + 1):
            lost = failed[study, arm].nonzero()[0].tolist()
            parts = [
                {s: v for s, v in seeded(x).items() if s not in lost} for x in noise[study, :, arm]
            ]
            made.append([Arm(str(arm), part, lost) for part in parts[: len(rules)]])
        found = [settle(arm, made[0], rules, design, arms).verdict for arm in made[1:]]
        wrong += any(verdict in ("better", "worse") for verdict in found)
    assert wrong / studies <= 0.075


def test_better_is_withheld_with_its_reason():
    base, arm = np.linspace(97.8, 98.2, 8), np.linspace(98.8, 99.2, 8)
    reason = "Not called better, because lr was chosen at the edge."
    found = one(arm, base, withhold={"arm": reason})
    assert found.verdict == "not settled"
    assert not found.is_open  # more runs would not help
    assert reason in found.sentence
    worse = one(base, arm, withhold={"arm": reason})
    assert worse.verdict == "worse"
    assert not worse.withheld


def test_divergence_is_counted_with_the_bound_that_so_few_runs_allow():
    base = np.linspace(97.8, 98.2, 8)
    equal = one(base + 0.01, base)
    assert equal.verdict == "equivalent"
    assert "0 of 8 runs diverged, so up to 31% might" in equal.sentence
    lost = one([*base[:7], 10.0], base, diverged={"arm": {7}})
    assert lost.verdict == "not settled"
    assert "1 of 8 runs diverged, so up to 47% might" in lost.sentence
    theirs = one(base, [*base[:7], 10.0], diverged={"base": {7}})
    assert "Of base, 1 of 8 diverged." in theirs.sentence


def test_tests_with_other_assumptions_are_named_where_they_disagree():
    base = [98.0, 98.1, 97.9, 98.05, 97.95, 98.02, 98.01, 97.99]
    arm = [98.12, 98.13, 98.14, 98.15, 98.16, 98.17, 98.18, 60.0]  # one run is lost
    found = one(arm, base)
    assert found.verdict == "not settled"
    assert "a rank test (p = 0.01" in found.doubt
    assert "would find a difference" in found.sentence
    clear = one([value + 1 for value in base], base)
    assert clear.doubt == ""
    shown = "+1.000 (95% interval +0.935 to +1.065, p < 0.001, 8 runs per arm)."
    assert clear.sentence == f"arm is better than base: {shown}"


KINDS = {
    "normal": lambda rng, shape: 0.4 * rng.standard_normal(shape),
    "heavy tails": lambda rng, shape: 0.4 * rng.standard_t(3, shape) / math.sqrt(3),
    "binomial": lambda rng, shape: 100 * (rng.binomial(360, 0.985, shape) / 360 - 0.985),
    "unequal": lambda rng, shape: (
        rng.standard_normal(shape) * np.array([0.2, 1.2, *[0.4] * 7])[: shape[1], None]
    ),
}


def judged(noise, design, effect=0.0):
    """Which arms of each study are called different, and which equivalent."""
    arms = noise.shape[1] - 1
    found = [
        judge(noise[:, i] + effect, noise[:, 0], design, margin=MARGIN, comparisons=arms)
        for i in range(1, arms + 1)
    ]
    return np.stack([f.sign for f in found], 1), np.stack([f.is_equivalent for f in found], 1)


@pytest.mark.parametrize("design", [FIXED, DEFAULT], ids=str)
@pytest.mark.parametrize("arms", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_false_verdicts_are_as_rare_as_promised(kind, arms, design):
    noise = KINDS[kind](np.random.default_rng(11), (2_000, arms + 1, design.last))
    sign, _ = judged(noise, design)
    assert (sign != 0).any(1).mean() <= 0.07
    for effect in (MARGIN, -MARGIN):
        _, is_equivalent = judged(noise, design, effect)
        assert is_equivalent.any(1).mean() <= 0.07


@pytest.mark.parametrize("design", [FIXED, DEFAULT], ids=str)
def test_many_studies_are_judged_as_each_of_them(design):
    rng = np.random.default_rng(5)
    noise = 98 + 0.4 * rng.standard_normal((30, 3, design.last))
    noise[:, 1] += np.linspace(0, 1, 30)[:, None]
    for arm in (1, 2):
        found = judge(noise[:, arm], noise[:, 0], design, margin=MARGIN, comparisons=2)
        for study in range(30):
            values = {str(i): seeded(noise[study, i]) for i in range(3)}
            single = compare(values, "0", margin=MARGIN, design=design, step=0.0)[arm - 1]
            verdict = {1: "better", -1: "worse", 0: "not settled"}[int(found.sign[study])]
            verdict = "equivalent" if found.is_equivalent[study] else verdict
            assert (single.verdict, single.n) == (verdict, found.n[study])


@pytest.mark.parametrize("images", [None, 360])
@pytest.mark.parametrize(("delta", "sigma", "arms"), [(0.5, 0.4, 2), (0.5, 0.4, 4), (0.3, 0.3, 3)])
def test_a_plan_keeps_its_promise(delta, sigma, arms, images):
    """Power by scipy's own test on other noise, rounded to whole images where there are some."""
    planned = plan(delta, sigma, comparisons=arms - 1, images=images, seconds=9, workers=2)
    assert planned.time == 9 * math.ceil(planned.seeds * arms / 2)
    rng = np.random.default_rng(77)
    base, arm = 98 + sigma * rng.standard_normal((2, 3_000, planned.seeds))
    arm = arm + delta
    if images:
        base, arm = (np.round(x * images / 100) * 100 / images for x in (base, arm))
    p = stats.ttest_ind(arm, base, axis=1, equal_var=False).pvalue
    found = (p < 1 - 0.95 ** (1 / (arms - 1))).mean()
    assert found == pytest.approx(planned.fixed.found, abs=0.04)
    assert found >= 0.76
    fewer = simulate(
        delta, sigma, Design((planned.seeds - 1,)), margin=delta, comparisons=arms - 1,
        step=100 / images if images else 0.0,
    )  # fmt: skip
    assert planned.seeds == LEAST or fewer.found < 0.8


def test_a_plan_of_looks_says_what_they_find():
    planned = plan(0.5, 0.4, comparisons=3, margin=0.5)
    none, margin, twice = planned.sequential
    assert [o.effect for o in planned.sequential] == [0, 0.5, 1.0]
    assert none.found < 0.03
    assert none.equivalent > 0.8
    assert margin.found > 0.85
    assert margin.equivalent < 0.02
    assert twice.found > 0.99
    assert 8 <= twice.runs < margin.runs < none.runs <= 24


def test_what_would_settle_settles():
    n = runs_to_settle(0.4, 0.5, comparisons=3)
    for effect, is_settled in ((0.0, "equivalent"), (0.5, "found")):
        outcome = simulate(effect, 0.4, Design((n,)), margin=0.5, comparisons=3)
        assert getattr(outcome, is_settled) >= 0.78
    assert runs_to_settle(0.0, 0.5) == LEAST


def test_a_small_study_plans_with_its_uncertainty():
    other = dict(enumerate([98.0, 98.3, 97.9], 10))
    noise = estimate_noise([seeded([97.2, 97.5, 96.9, 97.4]), other, {0: 99.0}])
    parts = [np.var([97.2, 97.5, 96.9, 97.4], ddof=1) * 3, np.var([98.0, 98.3, 97.9], ddof=1) * 2]
    assert noise.sigma == pytest.approx(math.sqrt(sum(parts) / 5))
    assert 3 <= noise.df <= 5
    assert noise.runs == 7
    low, high = plan(0.3, noise).seeds_interval
    assert low < plan(0.3, noise).seeds < high
    with pytest.raises(ValueError, match="an arm with 2 or more runs"):
        estimate_noise([{0: 1.0}, {0: 2.0}])
    with pytest.raises(ValueError, match="to be positive and finite, but got 0"):
        estimate_noise([seeded([1.0, 1.0])])


def test_arms_that_are_alike_tell_less_about_the_noise():
    """Reference: copies of an arm know as much as one; independent arms as much as all."""
    rng = np.random.default_rng(0)
    one, *others = (seeded(x) for x in rng.standard_normal((3, 200)))
    alike = estimate_noise([one] * 3)
    assert (alike.df, alike.runs) == (199, 600)
    assert 0.95 * 597 < estimate_noise([one, *others]).df <= 597
    few = [estimate_noise([seeded(x), seeded(x + 1), seeded(x - 1)])
           for x in rng.standard_normal((2_000, 4))]  # fmt: skip
    wrong = [abs(z) > stats.t.ppf(0.975, n.df) * n.sigma
             for z, n in zip(rng.standard_normal(2_000), few, strict=True)]  # fmt: skip
    assert np.mean(wrong) < 0.065


def test_the_interval_of_sigma_covers():
    rng = np.random.default_rng(0)
    noises = [Noise(x.std(ddof=1), 8) for x in rng.standard_normal((2_000, 8))]
    covered = [noise.interval()[0] <= 1 <= noise.interval()[1] for noise in noises]
    assert 0.935 < np.mean(covered) < 0.965


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan(0, 0.1), "`difference` to be positive"),
        (lambda: plan(1, "cifar"), "one of 'imagenet-resnet18', 'cifar10-resnet', but got 'cifar'"),
        (lambda: plan(1, 1, power=1), "`power` to be between 0 and 1"),
        (lambda: plan(1, 1, images=1), "`images` to be at least 2"),
        (lambda: plan(1e-4, 1), "3,000 runs per arm can find"),
        (lambda: plan(1, 1, comparisons=0), "`comparisons` to be at least 1"),
        (lambda: Design((8,), level=0), "`level` to be between 0 and 1"),
        (lambda: compare({"a": {0: 1.0}}, "a", margin=1), "one other arm, but got 'a'"),
        (lambda: compare({"a": {}, "b": {}}, "c", margin=1), "one of 'a', 'b', but got 'c'"),
        (lambda: compare({"a": {0: 1.0}, "b": {}}, "a", margin=1), "got none of 'b'"),
        (lambda: one([1.0], [1.0], margin=0), "`margin` to be positive"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
