"""``powergrad inspect``, ``report`` and ``watch``."""

from __future__ import annotations

import os
import sys
import webbrowser
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from powergrad.lab.files import csv_text, write_text
from powergrad.lab.report import write_report
from powergrad.lab.report.serving import LiveServer
from powergrad.lab.study.saving import FILE
from powergrad.lab.terminal import show_study


def inspect(
    source: Path,
    *,
    initial: Path | None = None,
    units_csv: Annotated[Path | None, Parameter(name="--csv")] = None,
    layers_csv: Path | None = None,
    events_csv: Path | None = None,
) -> int:
    """Show the dead filters, features and layers of a network, or the contents of a study.

    Args:
        source: The folder of a run, of a recording or of a study, or a checkpoint.
        initial: The weights at the start of training, to compare with.
        units_csv: Write the dead units to this CSV file, one row per unit.
        layers_csv: Write the counts per layer to this CSV file.
        events_csv: Write deaths, revivals and births to this CSV file.
    """
    from powergrad.monitor import Event, LayerCount, Recording, Unit, census  # import torch

    path = source
    if (source / FILE).is_file():
        for name, value in (("--csv", units_csv), ("--layers-csv", layers_csv),
                            ("--events-csv", events_csv), ("--initial", initial)):  # fmt: skip
            if value is not None:
                raise ValueError(f"Expected {name} with the folder of a run, but got a study.")
        show_study(source)
        return 0
    if source.is_dir() and not Recording.exists(source):
        path = source / "model.safetensors"
        if not path.is_file():
            wanted = f"Expected {str(source)!r} to hold a recording (norms/) or model.safetensors"
            raise ValueError(f"{wanted}, but got neither.")
    counts = census(path, initial=initial)
    print(counts)
    tables = (Unit, counts.units), (LayerCount, counts.layers), (Event, counts.events)
    for path, (kind, rows) in zip((units_csv, layers_csv, events_csv), tables, strict=True):
        if path is not None:
            columns = [field.name for field in fields(kind)]
            write_text(path, csv_text(columns, [_cells(vars(row)) for row in rows]))
    return 0


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    """A row for CSV, with ways to be dead as ``weight+gradient``, or ``weight=3 gradient=1``."""
    how = row.get("how", ())
    if isinstance(how, dict):
        return {**row, "how": " ".join(f"{way}={count}" for way, count in how.items())}
    return {**row, "how": "+".join(how)} if how else row


def report(*paths: Path, out: Path | None = None) -> int:
    """Write the page of runs and studies: one HTML file that works offline.

    Args:
        paths: Folders of runs or studies.
        out: The file to write; by default report.html in the folder, or in the working directory
            if there are several folders.
    """
    if not paths:
        raise ValueError("Expected the folder of a run or a study, but got none.")
    print(write_report(paths, out or (paths[0] if len(paths) == 1 else Path()) / "report.html"))
    return 0


def watch(
    folder: Path,
    *,
    port: int = 0,
    open_: Annotated[bool | None, Parameter(name="--open", negative="--no-open")] = None,
) -> int:
    """Serve the page of a study on this machine while it runs; stop with Ctrl-C.

    Args:
        folder: The folder of the study.
        port: The port on 127.0.0.1; 0 chooses a free one.
        open_: Whether to open a browser; by default if there is a display.
    """
    if not 0 <= port < 65536:
        raise ValueError(f"Expected --port to be from 0 to 65535, but got {port}.")
    try:
        server = LiveServer(folder, port)
    except OSError as error:
        remedy = "--port 0 chooses a free one"
        raise ValueError(f"Port {port} cannot be used: {error.strerror}; {remedy}.") from None
    with server:
        print(f"{folder} at {server.url} (Ctrl-C stops; the study continues)", flush=True)
        has_screen = any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
        has_screen = (has_screen or sys.platform == "darwin") and sys.stdout.isatty()
        if has_screen if open_ is None else open_:
            webbrowser.open(server.url)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()
    return 0
