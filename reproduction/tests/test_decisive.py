"""The rule of docs/protocol.md, its rows, and what is said of them."""

import hashlib
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from powergrad.lab.files import csv_text
from powergrad.lab.trainer.recipe import load_recipe
from powergrad.lab.trainer.run_folder import Run
from powergrad_cli import main
from reproduction.claims import CLAIMS, published_gains
from reproduction.decisive.findings import AXES, Findings, chosen_settings
from reproduction.decisive.observed import FURTHER, RECIPES, collect, differences, read, units
from reproduction.decisive.points import paired_points, points_table
from reproduction.decisive.rule import decide, holm, interval, power, sign_flip
from reproduction.evidence import RESULTS

DOCS = Path(__file__).parents[2] / "docs"
PROTOCOL = "5d55fa11db956840579e4a4af9cb3e54ab8aae5ad237271e319f019651776a5c"  # of docs/protocol.md


def scaled(strata):
    """The differences of all strata, each divided by the root mean square of its stratum."""
    return np.concatenate([np.array(s) / np.sqrt(np.mean(np.square(s))) for s in strata])


def made_up_rows(arms, repeats=8, seed=0, noise=0.1, lr="0.05", decay="0.001", **more):
    """Final rows of some arms: a mean for each, and noise."""
    rng = np.random.default_rng(seed)
    common = {"phase": "final", "diverged": "False", "classes": "10", "dead_units": "3"}
    common |= {"steps": "2811", "optimizer.lr": lr, "optimizer.weight_decay": decay, **more}
    return [
        {"arm": arm, "seed": str(3 * repeat + i), "repeat": str(repeat), **common,
         "test_accuracy": str(mean + rng.normal(0, noise))}
        for arm, mean in arms.items()
        for repeat in range(repeats)
        for i in range(3)
    ]  # fmt: skip


# The rule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(5,), (4, 4), (3, 6)])
def test_the_test_counts_every_pattern_of_signs(sizes):
    rng = np.random.default_rng(sum(sizes))
    strata = [(0.3 + rng.normal(0, 1 + i, n)).tolist() for i, n in enumerate(sizes)]
    values = scaled(strata)
    patterns = np.array(list(itertools.product((1, -1), repeat=len(values))))
    reached = np.abs(patterns @ values) >= abs(values.sum()) - 1e-9
    p, direction = sign_flip(strata)
    assert p == pytest.approx(reached.mean())
    assert direction == np.sign(values.sum())
    assert sign_flip([[1.0, -1.0], [2.0, -2.0]])[0] == 1.0  # a sum of zero


def test_holms_correction():
    assert holm({"a": 0.02, "b": 0.03}) == pytest.approx({"a": 0.04, "b": 0.04})
    assert holm({"a": 0.9, "b": 0.6}) == pytest.approx({"a": 1.0, "b": 1.0})


@pytest.mark.parametrize(
    ("norm", "plain", "verdict"),
    [
        ([0.3, 0.4, 0.5, 0.2, 0.3, 0.6, 0.4, 0.3], [1.0, 1.5] * 4, "helps"),
        ([-0.3, -0.4, -0.5, -0.2, -0.3, -0.6, -0.4, -0.3], [-1.0, -1.5] * 4, "hurts"),
        ([0.1, -0.1] * 4, [0.2, -0.2] * 4, "makes no difference that matters"),
        ([0.1, -0.1] * 4, [2.0, -2.0] * 4, "not settled"),
    ],
)
def test_the_four_verdicts(norm, plain, verdict):
    decision = decide({"norm": norm, "plain": plain})
    assert decision.verdict == verdict
    assert decision.means["norm"] == pytest.approx(np.mean(norm))
    low, high = stats.t.interval(0.9, 7, np.mean(norm), stats.sem(norm))
    assert interval(norm) == pytest.approx((low, high))


@pytest.mark.studies
def test_false_verdicts_are_as_rare_as_the_two_looks_allow():
    found = power(0.0, [0.3, 0.8], studies=400)
    assert found.get("helps", 0) + found.get("hurts", 0) <= 0.07
    assert power(0.5, [0.3, 0.8], studies=100)["helps"] > 0.9


# Rows ---------------------------------------------------------------------------------------------


def test_a_unit_is_the_mean_of_a_complete_repeat_and_a_lost_run_counts_as_chance():
    rows = made_up_rows({"baseline": 87.0, "pgt": 88.0}, repeats=2)
    rows[0] |= {"diverged": "True", "test_accuracy": "nan"}
    others = [float(row["test_accuracy"]) for row in rows[1:3]]
    assert units(rows, "baseline")[0] == pytest.approx((10 + sum(others)) / 3)
    rows[0]["classes"] = "100"
    assert units(rows, "baseline")[0] == pytest.approx((1 + sum(others)) / 3)
    assert list(units(rows[1:], "baseline")) == [1]  # the first repeat lacks a run
    assert len(differences(rows[1:], "pgt", "baseline")) == 1


def command(out, *more):
    """A small experiment of the protocol's form."""
    options = "--name decisive-norm --arms baseline --tune lr=0.006:0.4 wd=1e-5:3e-2 "
    options += "--tune-map identity --trials 2 --repeats 2 --seeds 3 --train.epochs 1 "
    options += "--schedule.warmup_epochs 0 --data.limit 64 --workers 1"
    arm = ["--arm", "half+pgt: loss.alpha=0.5"]  # the folders of its runs have another name
    return ["compare", "digits", *arm, *options.split(), "--out", str(out), *map(str, more)]


@pytest.mark.studies
def test_rows_are_collected_with_their_commits_and_a_fresh_clone_continues_from_them(tmp_path):
    first, second, results = (tmp_path / name for name in ("first", "second", "results"))
    results.mkdir()
    assert main(command(first)) == 0
    (path,) = collect(first, results)
    rows = read(results, "norm")
    assert len(rows) == 2 * 2 * (2 + 3)  # arms, repeats, points and seeds
    assert {row["phase"] for row in rows} == {"tuning", "final"}
    assert {row["arm"] for row in rows} == {"baseline", "half+pgt"}
    assert all(row["commit"] for row in rows)
    assert list(units(rows, "half+pgt")) == [0, 1]
    for row in rows:
        result = Run(first / "decisive-norm" / row["run"]).result()
        assert result is not None
        assert float(row["test_accuracy"]) == result.metrics["test_accuracy"]
    # Without the last repeat, as if it had not been done; nothing else is trained again.
    kept = [row for row in rows if row["repeat"] == "0"]
    path.write_text(csv_text(list(kept[0]), kept))
    assert main(command(second, "--reuse", path)) == 0
    trained = {p.parent.name for p in second.rglob("result.json")}
    assert len(trained) == 2 * (2 + 3)
    assert not trained & {Path(row["run"]).name for row in kept}
    collect(second, results)
    again = {row["run"]: row for row in read(results, "norm")}
    accuracies = {row["run"]: row["test_accuracy"] for row in rows}
    assert {name: row["test_accuracy"] for name, row in again.items()} == accuracies
    for row in kept:  # rows that are there already stay, to the letter
        filled = {key: value for key, value in row.items() if value}
        assert {key: value for key, value in again[row["run"]].items() if value} == filled
    before = path.read_bytes()
    collect(second, results)  # nothing is new
    assert path.read_bytes() == before


# What the page says of the measured rows ----------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    return Findings.read(RESULTS)


@pytest.fixture(scope="module")
def page():
    return " ".join((DOCS / "does-it-help.md").read_text("utf-8").split())


def test_the_page_states_the_exact_p_and_those_of_random_draws(measured, page):
    pairs = measured.pairs("pgt")
    assert {len(found) for found in pairs.values()} == {16}
    values = scaled(pairs.values())
    drawn = []  # as the program that was committed with the protocol drew them, with its seed first
    for seed in range(6):
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], (99_999, 32))
        drawn.append((np.sum(np.abs(signs @ values) >= abs(values.sum()) - 1e-9) + 1) / 100_000)
    exact = sign_flip(list(pairs.values()))[0]
    assert (exact * 2**32).is_integer()
    assert exact == pytest.approx(np.mean(drawn), abs=4 * np.sqrt(exact / 599_994))
    assert f"Counting all patterns gives p = {exact:.5f}: *not settled*" in page
    assert f"Those draws gave p = {drawn[0]:.5f}: *hurts*" in page
    assert f"standard error of {np.sqrt(exact * (1 - exact) / 99_999):.4f}" in page
    assert f"five other seeds gave {min(drawn[1:]):.5f} to {max(drawn[1:]):.5f}" in page


def test_the_page_states_both_analyses(measured, page):
    pairs = measured.pairs("pgt")
    first = decide({regime: found[:8] for regime, found in pairs.items()})
    assert first.verdict == "not settled"
    assert (
        f"After 8 repeats, p was {first.p:.3f} ({first.means['norm']:+.2f} points with batch "
        f"normalisation, {first.means['plain']:+.2f} without normalisation), so the experiment "
        "continued."
    ) in page
    assert measured.look == (16, decide(pairs))
    second = measured.look.decision
    assert f"After 16 repeats, p is {second.p:.4f}. So the rule does not call PGT worse" in page
    norm, plain = second.intervals["norm"], second.intervals["plain"]
    assert -0.3 < norm[0] < 0 < norm[1] < 0.3  # "within 0.3 points of 0"
    assert plain[1] < 0  # "the interval lies below 0"
    claims = {claim.id: claim for claim in CLAIMS}
    gains = {row: gain for gain, row in published_gains(claims["pgt-bn"])}
    assert f"{gains['T1.7']:+.2f} and {gains['T1.6']:+.2f} points for a ResNet-18" in page
    assert norm[0] < gains["T1.7"] < norm[1] < gains["T1.6"]  # "The first is within our interval"
    ((largest, _),) = published_gains(claims["agc-pgt"])
    assert f"**The paper's largest gain** ({largest:+.2f} points)" in page


def test_the_page_states_what_was_chosen(measured, page):
    ce, pgt = (
        {
            row["repeat"]: [f"{value:.4g}" for value in chosen_settings(row).values()]
            for row in measured.runs("plain", arm, "final")
        }
        for arm in ("baseline", "pgt")
    )
    same = [int(repeat) for repeat in ce if ce[repeat] == pgt[repeat]]
    assert f"In {len(same)} of the {len(ce)} repeats, cross-entropy and PGT chose the same" in page
    gaps = np.array(measured.pairs("pgt")["plain"])[same]
    assert f"the difference ({gaps.mean():+.2f} points) is the effect of PGT's settings" in page
    clipped, alone = (np.mean(measured.pairs(arm)["plain"]) for arm in ("agc+pgt", "agc"))
    assert f"this combination was {-clipped:.2f} points behind plain cross-entropy" in page
    assert f"clipping alone was {-alone:.2f} behind" in page
    clips = [choice["clip.agc"] for choice in measured.chosen("plain", "agc+pgt")]
    high = sum(clip > AXES[3].at(0.9) for clip in clips)
    assert f"In {high} of {len(clips)} repeats, the combination chose a threshold in" in page


def test_the_page_states_which_points_failed(measured, page):
    pairs = paired_points(measured.rows["plain"])
    only_pgt = [pair.lr for pair in pairs if pair.baseline is None and pair.other is not None]
    only_ce = [pair for pair in pairs if pair.other is None and pair.baseline is not None]
    neither = [pair for pair in pairs if pair.other is None and pair.baseline is None]
    assert f"There are {len(only_pgt)} points at which only PGT learned" in page
    others = f"{len(only_ce)} at which only cross-entropy did, and {len(neither)} at which both"
    assert others in page
    assert min(only_pgt) > AXES[0].at(2 / 3)  # "all at large learning rates": the last third


def test_every_row_has_a_commit_and_the_protocol_is_unchanged():
    assert hashlib.sha256((DOCS / "protocol.md").read_bytes()).hexdigest() == PROTOCOL
    for regime in ("norm", "plain", "null", *FURTHER):
        for row in read(RESULTS, regime):
            assert re.fullmatch("[0-9a-f]{12}", row["commit"]), row["run"]


# What is said -------------------------------------------------------------------------------------


def test_the_answer_has_the_rules_verdict_and_its_numbers():
    norm = made_up_rows({"baseline": 87.0, "pgt": 88.0, "ce3": 87.0})
    plain = made_up_rows({"baseline": 85.0, "pgt": 86.0, "ce3": 85.0, "agc+pgt": 83.0}, seed=1)
    findings = Findings({"norm": norm, "plain": plain}, made_up_rows({"baseline": 87.0}, seed=2))
    expected = decide(
        {r: differences(rows, "pgt", "baseline") for r, rows in findings.rows.items()}
    )
    assert findings.look == (8, expected)
    answer = findings.answer()
    assert answer.startswith("**PGT helps beyond a tuned learning rate and weight decay")
    assert "No gain" not in answer
    for regime in ("norm", "plain"):
        assert f"{expected.means[regime]:+.2f} points" in answer
    further = findings.secondary_sentence()
    clipped, head = (findings.secondary[name] for name in ("AGC+PGT2 - CE2", "PGT2 - CE3"))
    assert clipped.means == pytest.approx({"plain": -2.0}, abs=0.2)
    assert clipped.p >= sign_flip([differences(plain, "agc+pgt", "baseline")])[0]
    assert (
        f"{head.means['norm']:+.2f} points with batch normalisation and "
        f"{head.means['plain']:+.2f} points without normalisation (p < 0.001"
    ) in further
    assert f"plain cross-entropy by {clipped.means['plain']:+.2f} points without" in further
    assert "The test finds no difference, as it should" in findings.null_sentence()
    other = Findings(findings.rows, made_up_rows({"baseline": 88.0}, seed=1))
    assert "The test finds a difference, so do not trust" in other.null_sentence()


def test_an_unsettled_first_look_asks_for_the_second():
    arms = {"baseline": 87.0, "pgt": 87.0}
    short = made_up_rows(arms, noise=2)
    with pytest.raises(ValueError, match="16 repeats"):
        _ = Findings({"norm": short, "plain": short}, []).look
    rows = made_up_rows(arms, repeats=16, noise=2)
    assert Findings({"norm": rows, "plain": rows}, []).look.repeats == 16
    # Regimes that are only described do not decide.
    tiny = made_up_rows({"baseline": 20.0, "pgt": 30.5}, repeats=2, classes="100")
    findings = Findings({"norm": rows, "plain": rows, "tiny": tiny}, [])
    assert findings.look == Findings({"norm": rows, "plain": rows}, []).look
    _, described = findings.table().split("| Tiny-ImageNet, with batch normalisation | CE2 | 2 |")
    assert "|  | PGT2 | 2 | 30." in described


@pytest.mark.parametrize(
    ("arm", "inside", "outside"),
    [
        ("baseline", {}, {"lr": "0.0064"}),
        ("pgt", {"lr": "0.0625", "decay": "0.004"}, {"lr": "0.0016"}),  # backbone: 0.25 and 0.0064
        ("ce3", {"optimizer.head.lr": "0.25"}, {"optimizer.head.lr": "0.04"}),
        ("agc", {"clip.agc": "0.1"}, {"clip.agc": "0.006"}),
        ("agc+pgt", {"clip.agc": "0.1"}, {"clip.agc": "0.6"}),  # 0.025 and 0.15 of the backbone
    ],
)
def test_edges_are_those_of_the_backbone(arm, inside, outside):
    for settings, count in ((inside, 0), (outside, 8)):
        rows = made_up_rows({arm: 1.0}, **settings)
        assert Findings({"norm": [], "plain": rows}, []).at_edge("plain", arm) == count


def test_the_choices_are_those_of_the_backbone_with_their_decay_exponent():
    tried = {"0.02": "0.001", "0.04": "0.002", "0.08": "0.004"}
    ce = [
        {**row, "repeat": str(i)}
        for i, (lr, decay) in enumerate(tried.items())
        for row in made_up_rows({"baseline": 87.0}, repeats=1, lr=lr, decay=decay)
    ]
    image = [  # alpha * lr and wd / alpha
        {**row, "arm": "pgt", "optimizer.lr": str(float(row["optimizer.lr"]) / 4),
         "optimizer.weight_decay": str(float(row["optimizer.weight_decay"]) * 4)}
        for row in ce
    ]  # fmt: skip
    table = Findings({"norm": [*ce, *image], "plain": []}, []).choices_table().splitlines()
    cells = [cell.strip() for cell in table[2].strip("|").split("|")]
    title, chosen = "with batch normalisation", ["0.04 (0.02 to 0.08)", "0.002 (0.001 to 0.004)"]
    assert cells[:6] == [title, "CE2", *chosen, "", ""]
    # A cosine from lr to 0 has the mean lr / 2, and the warm-up of 0.15 of 3 epochs costs about as
    # much as half of its length at the peak.
    exponent = 2811 * 0.5 * 0.04 * 0.002 / (1 - 0.9)
    assert float(cells[6].split()[0]) == pytest.approx(exponent, rel=0.05)
    assert cells[7] == "3.0 (in 9 of 9 runs, 0 in the others)"
    assert table[3] == table[2].replace("CE2", "PGT2").replace(title, "")


def test_points_are_paired_by_the_backbone_and_the_seed():
    tried = [
        ("baseline", 1000, 0.01, 0.001, 86.0),
        ("pgt", 1000, 0.0025, 0.004, 85.5),
        ("baseline", 1000, 0.2, 0.0001, 10.0),  # learned nothing
        ("pgt", 1000, 0.05, 0.0004, 85.0),
        ("baseline", 1001, 0.02, 0.001, 87.0),
        ("pgt", 1001, 0.005, 0.004, None),  # diverged
        ("baseline", 1002, 0.05, 0.001, 87.0),  # another seed: no partner
        ("pgt", 1003, 0.0125, 0.004, 87.0),
        ("ce3", 1000, 0.01, 0.001, 10.0),
    ]
    keys = ("arm", "seed", "optimizer.lr", "optimizer.weight_decay", "test_accuracy")
    common = {"phase": "tuning", "classes": "10"}
    rows = [
        {**common, **dict(zip(keys, map(str, run), strict=True)), "diverged": str(run[4] is None)}
        for run in tried
    ]
    assert paired_points(rows) == [
        (0.01, 0.001, 86.0, 85.5),
        (0.02, 0.001, 87.0, None),
        (0.2, 0.0001, None, 85.0),
    ]
    assert [pair.difference for pair in paired_points(rows)] == [-0.5, None, None]
    assert paired_points(rows, "ce3") == [(0.01, 0.001, 86.0, None)]
    assert points_table(Findings({"norm": rows, "plain": rows}, [])).splitlines()[2:5] == [
        "| with batch normalisation | 0.006 to 0.024 | 2 | -0.50 | 0 of 1 | 0 | 1 |",
        "| with batch normalisation | 0.024 to 0.099 | 0 |  | 0 of 0 | 0 | 0 |",
        "| with batch normalisation | 0.099 to 0.4 | 1 |  | 0 of 0 | 1 | 0 |",
    ]


def test_the_recipes_are_what_the_protocol_says():
    recipes = {regime: load_recipe(path) for regime, path in RECIPES.items()}
    norm = recipes["norm"]
    assert (norm.model.name, norm.model.width, norm.model.norm) == ("resnet18", 8, "batch")
    assert (norm.data.name, norm.train.epochs, norm.train.batch_size) == ("fashion-mnist", 3, 64)
    optimizer = norm.optimizer
    assert (optimizer.name, optimizer.nesterov, optimizer.momentum) == ("sgd", True, 0.9)
    assert (norm.schedule.name, norm.schedule.warmup_start, norm.schedule.floor) == ("cosine", 0, 0)
    changed = {"model.norm": "none", "train.epochs": 6, "train.test_every": 6}
    assert norm.override({**changed, "schedule.warmup_epochs": 0.3}) == recipes["plain"]
    for regime, like in {"tiny": "norm", "cifar": "plain"}.items():  # which are only described
        for part in ("model", "optimizer", "loss"):
            assert getattr(recipes[regime], part) == getattr(recipes[like], part)
