"""``python -m powergrad.monitor PATH``: the census of a checkpoint or of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from powergrad.monitor.dead import census
from powergrad.monitor.thresholds import Thresholds


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the census; return 0, or 2 where the path or an option is not usable."""
    parser = argparse.ArgumentParser(
        prog="python -m powergrad.monitor",
        description="Which filters, gains and features are dead, how, and since when.",
    )
    parser.add_argument(
        "path", help="a checkpoint (safetensors or torch.save), or the folder of a recorded run"
    )
    parser.add_argument("--initial", metavar="CHECKPOINT", help="the weights at the start")
    parser.add_argument("--csv", metavar="FILE", help="write the units found, one a row")
    parser.add_argument("--layers-csv", metavar="FILE", help="write the counts of every layer")
    parser.add_argument("--events-csv", metavar="FILE", help="write deaths, revivals and births")
    lines = parser.add_argument_group("thresholds", "see powergrad.monitor.Thresholds")
    for each in fields(Thresholds):
        kind = int if each.name == "patience" else float
        lines.add_argument(
            f"--{each.name}", type=kind, default=each.default, help="default %(default)s"
        )
    given = parser.parse_args(arguments)
    try:
        thresholds = Thresholds(**{f.name: getattr(given, f.name) for f in fields(Thresholds)})
        found = census(given.path, initial=given.initial, thresholds=thresholds)
        if given.csv:
            found.to_csv(given.csv)
        if given.layers_csv:
            found.to_csv(given.layers_csv, "layers")
        if given.events_csv:
            found.to_csv(given.events_csv, "events")
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
