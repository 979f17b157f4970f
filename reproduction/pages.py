"""Every generated region of README.md and docs/, and the writing of the pages."""

from __future__ import annotations

from pathlib import Path

from powergrad.lab.files import write_text
from powergrad.lab.paper.evidence import Evidence
from reproduction.benchmarks import benchmark_regions
from reproduction.claims import claim_regions
from reproduction.decisive.page import decisive_regions, draw_figures
from reproduction.marks import Regions, fill, region_names
from reproduction.pooled import pooled_sentence
from reproduction.studies import all_trials, read_studies
from reproduction.tables import table_regions

__all__ = ["ROOT", "all_regions", "generated_pages", "study_regions", "write_pages"]

ROOT = Path(__file__).parents[1]
# Written once, before its experiment; `python -m reproduction.decisive power` made its table.
REGISTERED = ROOT / "docs" / "protocol.md"


def study_regions(results: Path) -> Regions:
    """The regions about the paper and all studies, from a folder ``results``."""
    evidence, studies = Evidence(results), read_studies(results)
    trials = all_trials(evidence, studies)
    return {
        **claim_regions(evidence, trials),
        **table_regions(evidence, studies, trials),
        "pooled": lambda: pooled_sentence(trials),
    }


def all_regions() -> Regions:
    """Every region that a page may have."""
    results = ROOT / "results"
    return {**benchmark_regions(), **study_regions(results), **decisive_regions(results)}


def generated_pages() -> list[Path]:
    """The pages that have regions."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [page for page in pages if page != REGISTERED and region_names(page.read_text("utf-8"))]


def write_pages() -> None:
    """Fill the regions of all pages, and draw the figures of the decisive experiment."""
    regions = all_regions()
    draw_figures(ROOT / "results", ROOT / "docs" / "images")
    for page in generated_pages():
        write_text(page, fill(page.read_text("utf-8"), regions))
        print(f"wrote {page.relative_to(ROOT)}")
