"""Tables of runs that were made elsewhere: ``powergrad compare --from``.

Oracles: the numbers that the tests write, and Python's own csv module.
"""

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies import powergrad

from powergrad.lab.study import load
from powergrad.lab.study.notes import verdict
from powergrad.lab.study.saving import compare_rows
from powergrad.lab.study.tables import parse_columns, read_rows, read_table
from powergrad.lab.trainer.recipe import RecipeError

VALUES = {
    "baseline": [90.1, 90.4, 89.8, 90.0, 90.3, 90.2, 89.9, 90.1],
    "pgt": [91.0, 91.3, 90.8, 91.2, 90.9, 91.1, 91.4, 90.7],
}
RUNS = [(arm, seed, value) for arm, v in VALUES.items() for seed, value in enumerate(v)]


def lines(header: str, template: str) -> str:
    """A table: `template` filled for every run."""
    rows = [template.format(arm=arm, seed=seed, value=value) for arm, seed, value in RUNS]
    return "\n".join([header, *rows]) + "\n"


PLAIN = lines("arm,seed,metric", "{arm},{seed},{value}")
WANDB = lines(
    '"Name","State","Group","Runtime","config.seed","lr","val/acc","val/loss","_step"',
    '"{arm}-{seed}","finished","{arm}","9{seed}","{seed}","0.1","{value}","0.{seed}","7"',
)
MLFLOW = lines(
    "run_id,experiment_id,status,params.seed,params.method,metrics.accuracy,tags.mlflow.runName",
    "a{seed},0,FINISHED,{seed},{arm},{value},fast-cat-{seed}",
)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def compare(path: Path, *options: object) -> int:
    return powergrad("compare", "--from", path, "--out", path.parent / "runs", *options)


def numbers(path: Path, metric: str | None = None, **options: Any) -> list[tuple[str, int, float]]:
    table = read_table(path, metric, **options)
    return [(row.arm, row.seed, row.metrics[table.metric]) for row in table.rows]


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        PLAIN.replace(",", ";"),
        PLAIN.replace(",", ";").replace(".", ","),
        PLAIN.replace(",", "\t").replace(".", ","),
        "sep=;\n" + PLAIN.replace(",", ";"),
        PLAIN.replace("\n", "\r\n") + ",,\r\n\r\n",
        PLAIN.replace(",", ", "),
        ",".join(("", PLAIN)).replace("\n", "\n1,").removesuffix("1,"),  # an index without a name
        lines("method,group,seed,acc", "sgd,{arm},{seed},{value}"),
        lines("arm,seed,lr,metric", "{arm},{seed},0.{seed},{value}"),
    ],
    ids=[
        "plain",
        "semicolons",
        "commas",
        "tabs",
        "sep=",
        "windows",
        "spaces",
        "index",
        "method",
        "usual",
    ],
)
def test_tables_that_need_no_help(tmp_path, text):
    assert numbers(write(tmp_path / "r.csv", text)) == RUNS


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings(tmp_path, encoding):
    path = tmp_path / "r.csv"
    path.write_bytes(PLAIN.replace("pgt", "größer").encode(encoding))
    assert {arm for arm, _, _ in numbers(path)} == {"baseline", "größer"}


@given(
    arms=st.lists(st.text("ab;,\t\" 'é\n", min_size=1, max_size=5), min_size=1, max_size=5),
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=5, max_size=5),
    delimiter=st.sampled_from(",;\t"),
)
def test_whatever_a_csv_writer_wrote_is_read(tmp_path, arms, values, delimiter):
    runs = [(arm, seed, value) for seed, (arm, value) in enumerate(zip(arms, values, strict=False))]
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([["arm", "seed", "metric"], *runs])
    path = tmp_path / "r.csv"
    path.write_text(text.getvalue(), newline="")
    wanted = [(arm.strip(), seed, value) for arm, seed, value in runs if arm.strip()]
    assert numbers(path) == wanted


def test_seeds_are_whole_numbers(tmp_path):
    large = 2**64 - 1
    text = f"arm,seed,metric\na,{large},1\na,3.0,2\n"
    assert numbers(write(tmp_path / "r.csv", text)) == [("a", large, 1.0), ("a", 3, 2.0)]
    with pytest.raises(RecipeError, match=r"'3\.5'"):
        numbers(write(tmp_path / "r.csv", "arm,seed,metric\na,3.5,1\n"))


def test_an_export_of_wandb(tmp_path, capsys):
    path = write(tmp_path / "export.csv", WANDB)
    assert compare(path) == 2
    assert "val/acc, val/loss" in capsys.readouterr().err
    assert compare(path, "--metric", "val/acc") == 0
    said = capsys.readouterr().out
    assert "arm = 'Group', seed = 'config.seed', metric = 'val/acc'" in said
    results = load(tmp_path / "runs/export")
    assert [(row.arm, row.seed, row.metrics["val/acc"]) for row in results.rows] == RUNS
    assert results.columns == ("val/acc", "Runtime", "lr", "val/loss")
    assert results.mean("pgt", "val/loss") == pytest.approx(sum(range(8)) / 80)
    assert re.search(r"val/loss +0\.35 +0\.35", said)  # kept and shown


def test_exports_of_mlflow(tmp_path):
    path = write(tmp_path / "runs.csv", MLFLOW)
    assert numbers(path, "metrics.accuracy") == RUNS
    assert read_table(path, "metrics.accuracy").source.columns == {
        "arm": "params.method", "seed": "params.seed", "metric": "metrics.accuracy"
    }  # fmt: skip
    page = lines(  # what the page of MLflow downloads
        "Start Time,Duration,Run ID,Name,Source Type,Source Name,User,Status,seed,accuracy",
        "2026,9{seed}s,id{seed},{arm},LOCAL,train.py,me,FINISHED,{seed},{value}",
    )
    assert numbers(write(path, page), "accuracy") == RUNS
    assert read_table(path, "accuracy").source.columns["arm"] == "Name"


@pytest.mark.parametrize("name", ["{arm}-seed{seed}", "seed_{seed}/{arm}", "{arm}, Seed={seed}"])
def test_names_of_runs_that_hold_their_seed(tmp_path, name):
    text = lines("Name;acc", f"{name};{{value}}")
    table = read_table(write(tmp_path / "r.csv", text))
    assert [(r.arm, r.seed, r.metrics["acc"]) for r in table.rows] == RUNS
    assert table.source.guessed == ("arm", "seed", "metric")


def test_columns_by_name(tmp_path, capsys):
    """They win over what would be found."""
    text = lines("arm,what,seed,number,acc,loss", "x{seed},{arm},0,{seed},{value},0.{seed}")
    path = write(tmp_path / "r.csv", text)
    options = ("--columns", "arm=what", "seed=number", "--metric", "acc", "--baseline", "pgt")
    assert compare(path, *options) == 0
    assert "guessed" not in capsys.readouterr().out
    results = load(tmp_path / "runs/r")
    assert [(row.arm, row.seed, row.metrics["acc"]) for row in results.rows] == RUNS
    assert verdict(results) == "Here baseline is worse than pgt."
    assert parse_columns(["arm=a=b", "seed=c d"]) == {"arm": "a=b", "seed": "c d"}


@pytest.mark.parametrize(
    ("text", "options", "word"),
    [
        (lines("group,method,seed,acc", "{arm},{arm}{seed},{seed},{value}"), (), "group, method"),
        (lines("arm,a/seed,b.seed,acc", "{arm},{seed},1{seed},{value}"), (), "a/seed, b.seed"),
        (lines("Name,seed,acc", "{arm}{seed},{seed},{value}"), (), "--columns arm=COLUMN"),
        (PLAIN, ("--columns", "arm=arms"), "'arm'"),
        (PLAIN, ("--columns", "metric=x"), "--metric x"),
        (PLAIN, ("--columns", "seeds=x"), "--columns"),
        (PLAIN.replace("seed", "arm", 1), (), "'arm' twice"),
        (PLAIN.replace(".", ","), (), "line 2"),
        (lines("arm,seed,a,b", "{arm},{seed},{value},1{seed}"), (), "a, b"),
        (PLAIN, ("--tune", "lr"), "--from only with"),
        (PLAIN, ("--seeds", "8"), "--from only with"),
    ],
)
def test_ambiguous_tables_raise(tmp_path, capsys, text, options, word):
    path = write(tmp_path / "r.csv", text)
    assert compare(path, *options) == 2
    assert word in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["r.csv"]


def test_runs_without_a_number_are_left_out_or_diverged(tmp_path, capsys):
    """Nothing at all, or the last number of a run that crashed: left out. NaN: it diverged."""
    text = WANDB.replace("91.2", "").replace("90.9", "nan").replace("91.1", "inf")
    text = text.replace('"baseline-1","finished"', '"baseline-1","crashed"')
    text = text.replace('"finished","baseline","97"', '"finished","","97"')
    assert compare(write(tmp_path / "r.csv", text), "--metric", "val/acc") == 0
    said = capsys.readouterr().out
    assert (
        "Left out: 1 run of baseline marked as crashed (seed 1); 1 run without Group (line 9); 1 "
        "run of pgt without val/acc (seed 3)."
    ) in said
    assert "2 of 7 runs of pgt failed (seed 4, 5): val/acc is nan" in said
    assert (tmp_path / "runs/r/report.html").read_text().count('"status":"left out"') == 2
    (comparison,) = load(tmp_path / "runs/r").comparisons
    assert (comparison.n, comparison.n_baseline, comparison.failed) == (5, 6, 2)
    again = read_table(tmp_path / "runs/r/study.csv", "val/acc")  # what is left out stays so
    left_out = {(run.arm, run.seed) for run in again.source.left_out if run.arm}
    assert left_out == {("baseline", 1), ("pgt", 3)}


def test_own_runs_need_every_number(tmp_path):
    with pytest.raises(RecipeError, match="line 3"):
        read_rows(write(tmp_path / "r.csv", PLAIN.replace("90.4", "")))


@pytest.mark.parametrize("column", ["loss", "val_err", "nll", "perplexity"])
def test_more_of_a_loss_is_worse(tmp_path, column):
    path = write(tmp_path / "r.csv", PLAIN.replace("metric", column))
    assert compare_rows(path, metric=column, margin=0.1).comparisons[0].verdict == "worse"
    assert compare_rows(path, margin=0.1, better="higher").comparisons[0].verdict == "better"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (PLAIN.replace("metric", "f1"), "`better`"),
        (lines("arm,seed,acc", "{arm},{seed},0.{seed}"), "`margin`"),  # fractions
        (PLAIN.replace("pgt", "baseline"), "twice"),
        ("arm,seed,metric\nbaseline,0,1\nbaseline,1,2\n", "arm"),
        ("", "none"),
    ],
)
def test_tables_that_cannot_be_compared_raise(tmp_path, text, word):
    with pytest.raises(ValueError, match=word):
        compare_rows(write(tmp_path / "r.csv", text))


def test_table_leaves_the_same_files_as_a_study(tmp_path, capsys):
    text = lines("arm,seed,loss,lr,note", "{arm},{seed},{value},0.{arm},a").replace("0.pgt", "0.4")
    path = write(tmp_path / "mine.csv", text.replace("0.baseline", "0.1"))
    assert compare(path, "--metric", "loss", "--margin", "0.2") == 0
    said = capsys.readouterr().out
    folder = tmp_path / "runs/mine"
    files = ["report.html", "study.csv", "study.json", "study.png"]
    assert sorted(file.name for file in folder.iterdir()) == files
    results = load(folder)
    (comparison,) = results.comparisons
    assert comparison.verdict == "worse"  # less of a loss is better, also after reading it again
    assert comparison.sentence in said
    assert [results.mean(arm, "lr") for arm in results.arms] == pytest.approx([0.1, 0.4])
    assert numbers(folder / "study.csv", "loss") == RUNS


def test_changed_file_is_rewritten_and_every_look_counts(tmp_path, capsys):
    few = "\n".join(line for line in PLAIN.splitlines() if not re.search(",[67],", line))
    path = write(tmp_path / "r.csv", few)
    assert compare(path) == compare(path) == 0
    said = capsys.readouterr()
    assert "changed" not in said.err
    assert "looked at" not in said.out
    write(path, PLAIN)
    assert compare(path) == 0
    said = capsys.readouterr()
    assert "has changed since" in said.err
    assert "looked at with 6 and 8 seeds without planning it" in said.out
    write(path, PLAIN.replace("pgt", "other"))  # other runs: nothing was seen of these
    assert compare(path) == 0
    assert "looked at" not in capsys.readouterr().out


@pytest.mark.parametrize("file", ["config.yaml", "study.json", "study.csv"])
def test_folder_with_other_files_is_left_alone(tmp_path, capsys, file):
    folder = tmp_path / "runs/r"
    folder.mkdir(parents=True)
    write(folder / file, PLAIN)
    path = write(tmp_path / "r.csv", PLAIN)
    assert compare(path) == 2
    assert f"another {file}" in capsys.readouterr().err
    assert [f.name for f in folder.iterdir()] == [file]
    assert (folder / file).read_text() == PLAIN
    assert compare(path, "--name", "other") == 0


TIMED = lines("arm,seed,acc,seconds", "{arm},{seed},{value},{seed}.5")


def conclusion(tmp_path: Path, text: str, *options: object) -> tuple[Any, str]:
    """The only comparison of a table, and the text of its page."""
    assert compare(write(tmp_path / "r.csv", text), *options) == 0
    results = load(tmp_path / "runs/r")
    page = (tmp_path / "runs/r/report.html").read_text()
    assert verdict(results) in page  # what the terminal printed
    (comparison,) = results.comparisons
    return comparison, f"{verdict(results)} {comparison.sentence}"


def test_target_of_a_table_with_one_arm(tmp_path, capsys):
    text = "arm,seed,loss\n" + "".join(f"new,{seed},3.2{seed}\n" for seed in range(8))
    found, said = conclusion(tmp_path, text, "--metric", "loss", "--target", 3.28)
    assert (found.verdict, found.target) == ("better", 3.28)
    assert "new is better than the target 3.28" in said
    (tmp_path / "runs").rename(tmp_path / "before")
    found, said = conclusion(tmp_path, text, "--metric", "loss", "--target", 3.23)
    assert found.verdict == "not settled"
    assert "cannot tell whether new differs from the target 3.23" in said


def test_known_noise_of_a_table_with_two_runs(tmp_path, capsys):
    text = "\n".join(line for line in PLAIN.splitlines() if not re.search(",[2-7],", line)) + "\n"
    options = ("--metric", "metric", "--margin", 0.1)
    found, _ = conclusion(tmp_path, text, *options)
    assert found.verdict == "not settled"
    capsys.readouterr()
    found, said = conclusion(tmp_path, text, *options, "--sigma", 0.2)
    assert found.verdict == "better"
    assert "known noise 0.2" in said
    assert "The noise of metric is not estimated: 0.2, as given" in capsys.readouterr().out
    write(tmp_path / "earlier.csv", PLAIN)
    earlier = ("--sigma-from", tmp_path / "earlier.csv")
    found, said = conclusion(tmp_path, text, *options, *earlier)
    assert (found.noise.runs, found.verdict) == (16, "better")
    assert 7 <= found.noise.df <= 14
    assert "estimated from 16 runs of earlier.csv" in said


def test_second_metric_of_a_table(tmp_path, capsys):
    options = ("--metric", "acc", "--margin", 0.5, "--and")
    found, said = conclusion(tmp_path, TIMED, *options, "seconds: better")
    assert found.verdict == "not settled"
    assert "whether pgt is not worse in acc by 0.5 and better in seconds than baseline" in said
    found, said = conclusion(tmp_path, TIMED, *options, "seconds: not worse 9")
    assert found.verdict == "better"
    assert "pgt is better in acc and not worse in seconds by 9 than baseline" in said
    assert found.second.margin == 9


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--and", "seconds"), "such as"),
        (("--and", "seconds: not worse"), "the margin"),
        (("--and", "tokens: better"), "tokens"),
        (("--and", "seconds: better", "--target", 1), "--target or --and"),
        (("--sigma", 1, "--sigma-from", "x.csv"), "--sigma or --sigma-from"),
        (("--sigma", 0), "`sigma`"),
        (("--sigma-from", "nowhere.csv"), "nowhere.csv"),
    ],
)
def test_bad_questions_are_named(tmp_path, capsys, options, word):
    assert compare(write(tmp_path / "r.csv", TIMED), "--metric", "acc", *options) == 2
    assert word in capsys.readouterr().err
