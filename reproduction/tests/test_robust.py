"""The rule of docs/protocol-2.md, its points and its rows."""

import hashlib
import itertools
import math
from collections import Counter

import pytest
from PIL import Image
from scipy import stats

from powergrad.lab.trainer.recipe import load_recipe
from reproduction import robust
from reproduction.evidence import RESULTS, csv_rows

# Of all points, and of docs/protocol-2.md.
POINTS = "4dcdb946ae5c79468c1e08f7ebbd476dd9acae55d1d4b6f00794c15412c23de7"
PROTOCOL = "db2e94269cd33cfa8015a9256fbeb3b331d42c5f4c5447804cf14b5ea399d0a2"


def row(point, arm, accuracy, dead=0, diverged=False, rate=0.1, batch=64):
    values = {"point": point, "arm": arm, "test_accuracy": accuracy, "dead_units": dead}
    values |= {"diverged": diverged, "rate": rate, "decay": 1e-3, "batch": batch}
    return {key: str(value) for key, value in values.items()}


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_points_and_protocol_are_the_registered_ones():
    points = robust.sobol_points(robust.POINTS, seed=2)
    assert digest(repr([tuple(point) for point in points])) == POINTS
    assert Counter(point.batch for point in points) == {64: 43, 256: 43, 1024: 42}
    assert all(0.05 <= p.rate <= 0.8 and 1e-5 <= p.decay <= 3e-3 for p in points)
    assert digest((RESULTS.parent / "docs" / "protocol-2.md").read_text("utf-8")) == PROTOCOL


def test_each_backbone_trains_alike_but_for_the_same_rate():
    point = robust.Point(0.2, 1e-3, 256)
    recipes = {
        arm: load_recipe(robust.RECIPE, robust.changes_of(arm, point)) for arm in robust.ARMS
    }
    for arm, recipe in recipes.items():
        alpha, optimizer = recipe.loss.alpha, recipe.optimizer
        factor = 1 / robust.ALPHA if arm == "pgt-same-rate" else 1
        assert optimizer.lr / alpha == pytest.approx(factor * point.rate), arm
        assert optimizer.lr * optimizer.weight_decay == pytest.approx(2e-4), arm
    assert recipes["head-lr"].optimizer.head.lr == robust.ALPHA**2
    assert recipes["agc"].clip.agc == robust.CLIP


@pytest.mark.parametrize(("first", "second"), [*itertools.product(range(6), repeat=2)])
def test_mcnemar_counts_every_pattern(first, second):
    n, least = first + second, min(first, second)
    tail = sum(math.comb(n, k) for k in range(least + 1)) / 2**n
    assert robust.mcnemar(first, second) == pytest.approx(min(1.0, 2 * tail))


def test_failures_are_compared_at_the_points_that_both_arms_have():
    rows = [row(0, "ce", 10.0), row(0, "pgt", 80.0), row(1, "ce", "nan"), row(1, "pgt", 29.9)]
    rows += [row(2, "ce", 85.0, diverged=True), row(2, "pgt", 30.0), row(3, "ce", 70.0)]
    assert robust.compare(rows, "ce", "pgt") == (3, 3, 1, 2, 0)


def study(only_ce, only_pgt):
    """All runs, of which cross-entropy and PGT failed at so many points; the others train."""
    for point, arm, _ in robust.jobs():
        fails = {"ce": point < only_ce, "pgt": 0 <= point - only_ce < only_pgt}
        dead = {"ce": 5, "pgt": 3}.get(arm, 0)
        yield row(point, arm, 10 if fails.get(arm) else 80, dead=dead)


@pytest.mark.parametrize(
    ("failures", "words"),
    [((12, 2), "fewer points"), ((2, 12), "more points"), ((6, 4), "No difference")],
)
def test_verdicts_by_the_rule(failures, words):
    concluded = robust.conclude([*study(*failures)])
    assert words in concluded.split("**")[1]
    assert f"p = {stats.binomtest(failures[0], sum(failures)).pvalue:.4f})" in concluded
    both = 128 - sum(failures)
    assert robust.fewer_dead([*study(*failures)], "pgt", "ce")[:2] == (both, 0)


def test_no_verdict_before_the_last_run(tmp_path):
    rows = [*study(12, 2)][:-1]
    concluded = robust.conclude(rows)
    assert "703 of 704" in concluded.split("**")[1]
    assert "p =" not in concluded
    assert "| PGT | 128 | 2 | 0.1 |" in robust.table(rows)
    robust.draw(rows, tmp_path / "map.png")
    with Image.open(tmp_path / "map.png") as image:
        assert image.width > 1000


def test_each_row_has_a_clean_commit_and_the_values_of_its_point():
    points = robust.sobol_points(robust.POINTS, seed=2)
    rows = csv_rows(robust.ROWS)
    assert len({(r["point"], r["arm"]) for r in rows}) == len(rows)
    for r in rows:
        point = points[int(r["point"])]
        assert (float(r["rate"]), float(r["decay"]), int(r["batch"])) == point
        assert len(r["commit"]) == 12
        assert r["arm"] in robust.ARMS
        assert r["epochs"] == "6" or robust.failed(r)


def test_changed_files_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(robust, "commit_of", lambda file: "0123456789ab-dirty")
    with pytest.raises(SystemExit, match="Commit"):
        robust.run_missing(tmp_path, tmp_path / "rows.csv", robust.jobs())


def test_a_run_is_kept_and_not_repeated(monkeypatch, tmp_path):
    monkeypatch.setattr(robust, "commit_of", lambda file: "0123456789ab")
    tiny = tmp_path / "tiny.yaml"
    tiny.write_text("base: digits\ntrain: {epochs: 1}\nschedule: {warmup_epochs: 0}\n")
    monkeypatch.setattr(robust, "RECIPE", tiny)
    monkeypatch.setattr(robust, "EPOCHS", 1)
    path, jobs = tmp_path / "rows.csv", robust.jobs()[:2]
    robust.run_missing(tmp_path, path, jobs[:1])
    first = path.read_text()
    robust.run_missing(tmp_path, path, jobs)
    assert path.read_text().startswith(first)
    rows = csv_rows(path)
    assert [r["arm"] for r in rows] == ["ce", "pgt"]
    assert {r["commit"] for r in rows} == {"0123456789ab"}
