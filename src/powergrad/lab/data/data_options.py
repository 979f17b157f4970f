"""The section `data` of a recipe: which images, and how they are augmented."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from powergrad.lab.data.sets import SETS
from powergrad.lab.words import did_you_mean

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]

# Keys of earlier versions, and the values with which the training was as it is now.
GONE = {"mixup": (0,), "cutmix": (0,), "ema": (None,), "alpha_schedule": ("constant",)}
GONE |= {"zero_init_residual": (False,), "keep_best": (False, True)}


class Section(BaseModel):
    """A part of a recipe: immutable, without unknown keys; `train --keys` prints the texts."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _read_earlier_versions(cls, values: Any) -> Any:
        """Leave out the keys of earlier versions, if they change nothing."""
        if not isinstance(values, Mapping):
            return values
        return {key: value for key, value in values.items() if value not in GONE.get(key, ())}


class Data(Section):
    name: Annotated[str, "digits, noisy-digits, fashion-mnist, cifar10 or folder:PATH"] = "digits"
    size: Annotated[Count | None, "side of an image (default: as stored; folders: 224)"] = None
    crop_padding: Annotated[Natural, "pad by this many pixels, then crop at random"] = 0
    flip: Annotated[bool, "mirror at random"] = False
    scale: Annotated[tuple[Share, Share], "folders: range of crop area fractions"] = (0.08, 1.0)
    ratio: Annotated[
        tuple[Positive, Positive], "folders: range of the random crop's aspect ratio"
    ] = (3 / 4, 4 / 3)
    test_crop: Annotated[Share, "folders: side of the centre crop in tests, as a fraction"] = 0.875
    bad_images: Annotated[Literal["refuse", "skip"], "what to do with unreadable images"] = "refuse"
    hold_out: Annotated[BelowOne, "test on this fraction of the training data instead"] = 0.0
    groups: Annotated[
        re.Pattern[str] | None,
        "folders: regular expression; images whose paths have the same match (of its first group, "
        "if any) are held out together; no effect if hold_out is 0",
    ] = None
    limit: Annotated[Count | None, "use only this many training examples"] = None

    @property
    def is_folder(self) -> bool:
        return self.name.startswith("folder:")

    @property
    def path(self) -> Path:
        """The folder of images."""
        return Path(self.name.removeprefix("folder:")).expanduser()

    @property
    def title(self) -> str:
        """The name of the data for display; for a folder, its name without the path."""
        if not self.is_folder:
            return self.name
        return self.path.name if self.path.name not in ("", "..") else self.path.resolve().name

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name not in SETS and not name.startswith("folder:"):
            is_folder = Path(name).expanduser().is_dir()
            meant = f"; did you mean folder:{name}?" if is_folder else did_you_mean(name, SETS)
            raise ValueError(f"expected {', '.join(SETS)} or folder:PATH, but got {name!r}{meant}")
        return name

    @field_validator("scale", "ratio")
    @classmethod
    def _check_order(cls, ends: tuple[float, float]) -> tuple[float, float]:
        if ends[0] > ends[1]:
            raise ValueError(f"expected the smaller value first, but got {ends[0]} and {ends[1]}")
        return ends

    @model_validator(mode="after")
    def _check_kind(self) -> Data:
        if self.groups is not None and not self.is_folder:
            raise ValueError(f"expected no groups for {self.name}, but got {self.groups.pattern!r}")
        if self.crop_padding and self.is_folder:
            wanted = "scale and ratio instead of crop_padding for a folder"
            raise ValueError(f"expected {wanted}, but got {self.crop_padding}")
        return self
