"""Every generated region of README.md, docs/ and results/, and the writing of the pages."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables import benchmark_regions
from powergrad.lab.files import write_text
from reproduction import robust
from reproduction.claims import claim_regions
from reproduction.decisive.figure import draw
from reproduction.decisive.findings import Findings
from reproduction.decisive.points import draw_points, points_table
from reproduction.evidence import RESULTS, Evidence, csv_rows
from reproduction.experiments import experiment_regions
from reproduction.marks import Regions, fill, region_names
from reproduction.tables import table_regions

ROOT = Path(__file__).parents[1]
# Written once, before their experiments; `python -m reproduction.decisive power` made its table.
REGISTERED = [ROOT / "docs" / "protocol.md", ROOT / "docs" / "protocol-2.md"]


def study_regions(results: Path) -> Regions:
    """The regions about the paper and all studies, from a folder ``results``."""
    evidence = Evidence(results)
    return {
        **claim_regions(evidence),
        **experiment_regions(evidence),
        **table_regions(evidence.trials),
    }


def registered_regions() -> Regions:
    """The regions about the registered experiments."""
    first, second = Findings.read(RESULTS), csv_rows(robust.ROWS)
    return {
        "decisive-answer": first.answer,
        "decisive-secondary": first.secondary_sentence,
        "decisive-arms": first.table,
        "decisive-choices": first.choices_table,
        "decisive-null": first.null_sentence,
        "decisive-points": lambda: points_table(first),
        "robust-answer": lambda: robust.conclude(second),
        "robust-arms": lambda: robust.table(second),
    }


def all_regions() -> Regions:
    """Every region that a page may have."""
    return {**benchmark_regions(), **study_regions(RESULTS), **registered_regions()}


def generated_pages() -> list[Path]:
    """The pages that have regions."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("results/*.md")]
    with_regions = (page for page in pages if region_names(page.read_text("utf-8")))
    return [page for page in with_regions if page not in REGISTERED]


def write_pages() -> None:
    """Fill the regions of all pages, and draw the figures of the registered experiments."""
    regions, findings = all_regions(), Findings.read(RESULTS)
    images = ROOT / "docs" / "images"
    draw(findings, images / "decisive.png")
    draw_points(findings, images / "decisive_points.png")
    robust.draw(csv_rows(robust.ROWS), images / "robust.png")
    for page in generated_pages():
        write_text(page, fill(page.read_text("utf-8"), regions))
        print(f"wrote {page.relative_to(ROOT)}")
