"""Describes a folder of images before training, without decoding them.

Images that cannot be read are found by the first epoch: `data.bad_images` says what happens then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from powergrad.lab.data.data_options import Data
from powergrad.lab.data.listing import list_folder, open_folder, some

FEW = 10  # warn about classes with fewer training images


def scan_folder(config: Data, data_dir: str | None = None) -> Iterator[str]:
    """What a run uses of a folder, what it ignores, and warnings; raises if it cannot be used."""
    list_folder.cache_clear()  # it may have changed
    folder = open_folder(config, data_dir)
    train, test = folder.choose(config)
    images = f"{len(train.labels):,} training images, {len(test.labels):,} test images"
    yield f"{folder.root}: {images}, {len(folder.classes):,} classes"
    for why, paths in folder.ignored.items():
        yield f"  ignored ({why}): {len(paths):,}, {some(paths, 3)}"
    splits = folder.splits()
    if len({os.path.realpath(listing.root) for listing in splits.values()}) < len(splits):
        names = " and ".join(splits)
        yield f"Warning: {names} are the same folder, so tests would use training images."
    fewer = f"with fewer than {FEW} training images"
    for text, part, least in (("without test images", test, 1), (fewer, train, FEW)):
        counts = np.bincount(part.labels, minlength=len(folder.classes))
        if rare := [folder.classes[k] for k in np.flatnonzero(counts < least).tolist()]:
            share = f"({len(rare):,} of {len(folder.classes):,})"
            yield f"Warning: Classes {text} {share}: {some(rare)}."
