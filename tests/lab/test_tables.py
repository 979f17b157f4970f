"""Tables of runs that were made elsewhere: ``powergrad compare --from``.

Oracles: the numbers that the tests write, Python's own csv module, and scipy.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_ind

import powergrad_cli
from powergrad.lab.stats import error_of_looks
from powergrad.lab.study import Results
from powergrad.lab.study.tables import parse_columns, read_table
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
    tokens = ["compare", "--from", path, "--out", path.parent / "runs", *options]
    return powergrad_cli.main([str(token) for token in tokens])


def numbers(path: Path, metric: str | None = None, **options: Any) -> list[tuple[str, int, float]]:
    table = read_table(path, metric, **options)
    return [(row.arm, row.seed, row.metrics[table.metric]) for row in table.rows]


# Which file it is ---------------------------------------------------------------------------------


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
    ],
    ids=["plain", "semicolons", "decimal commas", "tabs", "sep=", "windows", "spaces", "index"],
)
def test_delimiters(tmp_path, text):
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
    with pytest.raises(RecipeError, match=r"in line 2 of .* but got '3.5' and '1'"):
        numbers(write(tmp_path / "r.csv", "arm,seed,metric\na,3.5,1\n"))


# Which column is which ----------------------------------------------------------------------------


def test_an_export_of_wandb(tmp_path, capsys):
    path = write(tmp_path / "export.csv", WANDB)
    assert compare(path) == 2
    assert "choose it with --metric), but got val/acc, val/loss." in capsys.readouterr().err
    assert compare(path, "--metric", "val/acc") == 0
    said = capsys.readouterr().out
    assert "arm = 'Group', seed = 'config.seed', metric = 'val/acc'. To choose others" in said
    results = Results.load(tmp_path / "runs" / "export")
    assert [(row.arm, row.seed, row.metrics["val/acc"]) for row in results.rows] == RUNS
    (comparison,) = results.comparisons
    _, alone = ttest_ind(VALUES["pgt"], VALUES["baseline"], equal_var=False)
    assert comparison.p == pytest.approx(alone, rel=1e-6)
    assert results.columns == ("val/acc", "Runtime", "val/loss")
    assert results.mean("pgt", "val/loss") == pytest.approx(sum(range(8)) / 80)
    assert re.search(r"val/loss +0\.35 +0\.35", said)  # kept and shown


def test_exports_of_mlflow(tmp_path):
    path = write(tmp_path / "runs.csv", MLFLOW)
    table = read_table(path)
    assert [(r.arm, r.seed, r.metrics["accuracy"]) for r in table.rows] == RUNS
    assert table.metric == "accuracy"
    assert table.source.columns == {
        "arm": "params.method", "seed": "params.seed", "metric": "metrics.accuracy"
    }  # fmt: skip
    page = lines(  # what the page of MLflow downloads
        "Start Time,Duration,Run ID,Name,Source Type,Source Name,User,Status,seed,accuracy",
        "2026,9{seed}s,id{seed},{arm},LOCAL,train.py,me,FINISHED,{seed},{value}",
    )
    assert numbers(write(path, page), "accuracy") == RUNS
    assert read_table(path).source.columns["arm"] == "Name"


@pytest.mark.parametrize("name", ["{arm}-seed{seed}", "seed_{seed}/{arm}", "{arm}, Seed={seed}"])
def test_names_of_runs_that_hold_their_seed(tmp_path, name):
    text = lines("Name;acc", f"{name};{{value}}")
    table = read_table(write(tmp_path / "r.csv", text))
    assert [(r.arm, r.seed, r.metrics["acc"]) for r in table.rows] == RUNS
    assert table.source.guessed == ("arm", "seed", "metric")


def test_columns_by_name(tmp_path, capsys):
    """They win over what would be found, and the others are kept under a name that is free."""
    text = lines("arm,what,seed,number,acc,loss", "x{seed},{arm},0,{seed},{value},0.{seed}")
    path = write(tmp_path / "r.csv", text)
    options = ("--columns", "arm=what", "seed=number", "--metric", "acc", "--baseline", "pgt")
    assert compare(path, *options) == 0
    assert "guessed" not in capsys.readouterr().out
    results = Results.load(tmp_path / "runs" / "r")
    assert [(row.arm, row.seed, row.metrics["acc"]) for row in results.rows] == RUNS
    assert results.rows[3].metrics["arm (column)"] == "x3"
    assert results.verdict() == "Here baseline is worse than pgt."
    assert parse_columns(["arm=a=b", "seed=c d"]) == {"arm": "a=b", "seed": "c d"}


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (lines("group,method,seed,acc", "{arm},{arm}{seed},{seed},{value}"), (),
         "the arm, but got group, method; choose it with --columns arm=COLUMN"),
        (lines("arm,a/seed,args.seed,acc", "{arm},{seed},1{seed},{value}"), (),
         "the seed, but got a/seed, args.seed; choose it with --columns seed=COLUMN"),
        (lines("Name,seed,acc", "{arm}{seed},{seed},{value}"), (),
         "none of which is clearly the arm; choose it with --columns arm=COLUMN"),
        (PLAIN, ("--columns", "arm=arms"), "but got arm, seed, metric; did you mean 'arm'?"),
        (PLAIN, ("--columns", "metric=x"), "Expected --metric x, but got --columns metric=x."),
        (PLAIN, ("--columns", "seeds=x"), "Expected --columns arm=COLUMN seed=COLUMN"),
        (PLAIN.replace("seed", "arm", 1), (), "columns with different names, but got 'arm' twice"),
        (PLAIN.replace(".", ","), (), "to have 3 cells in line 2, but got 4"),
        (lines("arm,seed,a,b", "{arm},{seed},{value},1{seed}"), (), "--metric), but got a, b."),
        (PLAIN, ("--tune", "lr"), "Expected --from only with --metric"),
        (PLAIN, ("--seeds", "8"), "Expected --from only with --metric"),
    ],
)  # fmt: skip
def test_what_is_not_clear_is_asked_for(tmp_path, capsys, text, options, message):
    path = write(tmp_path / "r.csv", text)
    assert compare(path, *options) == 2
    assert message in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["r.csv"]


def test_a_column_with_one_value_is_not_the_arm(tmp_path):
    text = lines("method,group,seed,random_seed,acc", "sgd,{arm},{seed},{seed},{value}")
    assert numbers(write(tmp_path / "r.csv", text)) == RUNS


@pytest.mark.parametrize("options", [["--columns", "arm=x"], ["--baseline", "pgt"]])
def test_options_of_tables_need_one(tmp_path, capsys, options):
    assert powergrad_cli.main(["compare", "--out", str(tmp_path), *options]) == 2
    assert f"Expected {options[0]} only with --from" in capsys.readouterr().err


# Runs without a number ----------------------------------------------------------------------------


def test_runs_without_a_number_are_stated(tmp_path, capsys):
    """Nothing at all, or the last number of a run that crashed: left out. NaN: it diverged."""
    text = WANDB.replace("91.2", "").replace("90.9", "nan").replace("91.1", "inf")
    text = text.replace('"baseline-1","finished"', '"baseline-1","crashed"')
    text = text.replace('"finished","baseline","97"', '"finished","","97"')
    path = write(tmp_path / "r.csv", text)
    assert compare(path, "--metric", "val/acc") == 0
    said = capsys.readouterr().out
    stated = (
        "Left out: 1 run of baseline marked as crashed (seed 1); 1 run without Group (line 9); 1 "
        "run of pgt without val/acc (seed 3). If such a run diverged, write nan as its val/acc, "
        "so that it counts."
    )
    assert stated in said
    assert "Diverged: 2 of 7 runs of pgt. A run that diverged counts as 89.8." in said
    folder = tmp_path / "runs" / "r"
    saved = json.loads((folder / "study.json").read_text())
    (comparison,) = saved["comparisons"]
    assert (comparison["n"], comparison["n_baseline"], comparison["diverged"]) == (7, 6, 2)
    assert stated in saved["notes"]
    assert stated in data_of(folder / "report.html")["studies"][0]["notes"]
    states = {(run["arm"], run["seed"]): run["status"] for run in runs_of(folder / "report.html")}
    assert states[1, 3] == states[0, 1] == "left out"
    assert states[1, 4] == states[1, 5] == "diverged"
    again = read_table(folder / "study.csv", "val/acc")  # what is left out stays so
    assert {(run.arm, run.seed) for run in again.source.left_out if run.arm} == {
        ("baseline", 1), ("pgt", 3)
    }  # fmt: skip


def test_the_reader_of_our_own_runs_wants_every_number(tmp_path):
    from powergrad.lab.study.tables import read_rows

    with pytest.raises(RecipeError, match="Expected metric in line 3 of"):
        read_rows(write(tmp_path / "r.csv", PLAIN.replace("90.4", "")))


# What it leaves -----------------------------------------------------------------------------------


class _Data(HTMLParser):
    text = ""
    inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = dict(attrs).get("id") == "data"

    def handle_data(self, data: str) -> None:
        self.text += data if self.inside else ""


def data_of(page: Path) -> dict[str, Any]:
    parser = _Data()
    parser.feed(page.read_text())
    return json.loads(parser.text)


def runs_of(page: Path) -> list[dict[str, Any]]:
    return data_of(page)["studies"][0]["runs"]


def test_the_same_files_as_of_a_study(tmp_path, capsys):
    text = lines("arm,seed,loss,lr,note", "{arm},{seed},{value},0.{arm},a").replace("0.pgt", "0.4")
    path = write(tmp_path / "mine.csv", text.replace("0.baseline", "0.1"))
    assert compare(path, "--metric", "loss", "--margin", "0.2") == 0
    said = capsys.readouterr().out
    folder = tmp_path / "runs" / "mine"
    files = ["report.html", "study.csv", "study.json", "study.png"]
    assert sorted(file.name for file in folder.iterdir()) == files
    assert (folder / "study.png").read_bytes()[:4] == b"\x89PNG"
    results = Results.load(folder)
    (study,) = data_of(folder / "report.html")["studies"]
    (comparison,) = results.comparisons
    assert comparison.verdict == "worse"  # less of a loss is better, also after reading it again
    for shown in (study["headline"], comparison.sentence, "Here pgt is worse than baseline."):
        assert shown in said
    assert (study["headline"], study["higher"]) == (results.verdict(), False)
    assert [c["sentence"] for c in study["comparisons"]] == [comparison.sentence]
    assert [arm["changes"] for arm in study["arms"]] == [{"lr": 0.1}, {"lr": 0.4}]
    pgt = study["arms"][1]["summary"]["loss"]
    assert (pgt["mean"], pgt["n"]) == (pytest.approx(math.fsum(VALUES["pgt"]) / 8), 8)
    assert numbers(folder / "study.csv", "loss") == RUNS
    page = (folder / "report.html").read_text()
    assert powergrad_cli.main(["report", str(folder)]) == 0
    again = data_of(folder / "report.html")["studies"]
    assert again == data_of(write(tmp_path / "p.html", page))["studies"]


def test_a_changed_file_is_written_anew_and_every_look_counts(tmp_path, capsys):
    few = "\n".join(line for line in PLAIN.splitlines() if not re.search(",[67],", line))
    path = write(tmp_path / "r.csv", few)
    assert compare(path) == compare(path) == 0
    said = capsys.readouterr()
    assert "changed" not in said.err
    assert "looked at" not in said.out
    write(path, PLAIN)
    assert compare(path) == 0
    said = capsys.readouterr()
    folder = tmp_path / "runs" / "r"
    words = f"{path} has changed since {folder} was written; the folder is rewritten.\n"
    assert said.err == words
    chance = 100 * error_of_looks([6, 8], 1)
    assert "looked at with 6 and 8 seeds without planning it" in said.out
    assert f"the probability of any false verdict is {chance:.1f}%, not 5%." in said.out
    assert len(Results.load(folder).rows) == 16
    write(path, PLAIN.replace("pgt", "other"))  # other runs: nothing was seen of these
    assert compare(path) == 0
    assert "looked at" not in capsys.readouterr().out


@pytest.mark.parametrize("file", ["study.yaml", "config.yaml", "study.json", "study.csv"])
def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys, file):
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    write(folder / file, PLAIN)
    path = write(tmp_path / "r.csv", PLAIN)
    assert compare(path) == 2
    assert f"but got another {file} in it; choose another --name" in capsys.readouterr().err
    assert [f.name for f in folder.iterdir()] == [file]
    assert (folder / file).read_text() == PLAIN
    assert compare(path, "--name", "other") == 0
    assert (tmp_path / "runs" / "other" / "report.html").is_file()
