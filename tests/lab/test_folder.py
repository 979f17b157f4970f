"""Folders of images: which files, which pixels, bad ones, and threads."""

import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, JpegImagePlugin, UnidentifiedImageError
from scipy import stats

from powergrad.lab.data import Data, Datasets, fingerprint, folder, load_data
from powergrad.lab.data.folder import centre_box, random_box, read_image
from powergrad.lab.data.listing import list_folder, open_folder
from powergrad.lab.data.streams import Stream, permutation, uniform

MEAN = np.reshape([0.485, 0.456, 0.406], (3, 1, 1))
STD = np.reshape([0.229, 0.224, 0.225], (3, 1, 1))
LEVEL = 1.01 / 255 / STD.min()  # one level of 255, normalised
BILINEAR = Image.Resampling.BILINEAR


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth noise, so that neighbouring pixels have something to do with each other."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def put(path: Path, image: Image.Image | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or picture(20, 16)).save(path, **options)
    return path


def make_folder(root: Path, train: int = 6, val: int = 3) -> Path:
    """Two classes, a and b; each image has its own seed."""
    for part, count in (("train", train), ("val", val)):
        for k, i in np.ndindex(2, count):
            put(root / part / "ab"[k] / f"{i}.png", picture(24, 18, seed=100 * k + i))
    return root


def load(root: Path, workers: int = 0, **options: Any) -> Datasets:
    """The data of a folder, as a new process sees them."""
    list_folder.cache_clear()
    return load_data(Data(name=f"folder:{root}", **{"size": 12, **options}), workers=workers)


def whole(width: int, height: int) -> tuple[int, int, int, int]:
    return 0, 0, width, height


def planes(image: Any) -> np.ndarray:
    return np.moveaxis(np.atleast_3d(np.asarray(image, float)), 2, 0)


def paths_of(split: Any) -> list[str]:
    return [os.fsdecode(path) for path in split.listing.paths]


def test_names_may_contain_any_byte(tmp_path):
    names = [b"a b.png", b"two\nlines.png", b"\xff\xfe.png", "été.png".encode(), b"'\"$;*.png"]
    put(tmp_path / "val" / "sp ace" / "x.png")
    for name in names:
        path = os.fsencode(tmp_path) + b"/train/sp ace/" + name
        put(tmp_path / "train" / "sp ace" / "x.png").rename(os.fsdecode(path))
    put(tmp_path / "train" / "z" / "1.png")
    train = load(tmp_path).train
    expected = [*sorted(b"sp ace/" + name for name in names), b"z/1.png"]
    assert list(map(os.fsencode, paths_of(train))) == expected
    (batch,) = train.train_batches(6, seed=0, epoch=0)
    assert batch.images.shape == (6, 3, 12, 12)
    (tmp_path / os.fsdecode(b"train/sp ace/\xff\xfe.png")).write_bytes(b"no image")
    with pytest.raises(ValueError, match="udcff") as caught:
        list(load(tmp_path).train.train_batches(6, seed=0, epoch=0))
    str(caught.value).encode()  # can be printed


def test_listed_images_and_the_reasons_of_ignored_entries(tmp_path):
    train = make_folder(tmp_path) / "train"
    for name in ("1.JPG", "2.jpeg", "4.webp", "deep/er/6.png", ".hidden.png", ".cache/7.png"):
        put(train / "a" / name)
    for name in ("val/.DS_Store", "train/a/notes.TXT", "val/b/LICENSE", "train/list.csv"):
        (tmp_path / name).write_text("")
    put(tmp_path / "elsewhere" / "8.png")
    put(train / "lonely.png")
    for link, target in {
        "a/9.png": tmp_path / "elsewhere" / "8.png",
        "a/linked": tmp_path / "elsewhere",
        "a/twice": tmp_path / "elsewhere",
        "b/linked": tmp_path / "elsewhere",  # a folder may be in two classes
        "a/circle": train / "a",
        "a/up": train,
        "a/further": tmp_path.parent,
        "itself": "itself",
        "same": ".",
        "parent": tmp_path,
        "nowhere": "gone",
        "b/out": tmp_path / "other",
        "../other/back": train / "b",
    }.items():
        (train / link).parent.mkdir(exist_ok=True)
        (train / link).symlink_to(target)
    folder = open_folder(Data(name=f"folder:{tmp_path}"))
    names = ["0.png", "1.JPG", "1.png", "2.jpeg", "2.png", "3.png", "4.png", "4.webp", "5.png"]
    names += ["9.png", "deep/er/6.png", "linked/8.png"]
    in_b = [*(f"{i}.png" for i in range(6)), "linked/8.png"]
    expected = [f"a/{name}" for name in names] + [f"b/{name}" for name in in_b]
    assert list(map(os.fsdecode, folder.train.paths)) == expected
    assert folder.train.labels.tolist() == [0] * 12 + [1] * 7
    assert (folder.classes, folder.problems) == (("a", "b"), [])
    again = ["a/twice", "a/circle", "a/up", "a/further", "same", "parent", "b/out/back"]
    assert {reason: sorted(paths) for reason, paths in folder.ignored.items()} == {
        "hidden": ["train/a/.cache", "train/a/.hidden.png", "val/.DS_Store"],
        "broken link": ["train/itself", "train/nowhere"],
        "folder above, or already included": sorted(f"train/{name}" for name in again),
        "not in a class folder": ["train/list.csv", "train/lonely.png"],
        "extension .txt": ["train/a/notes.TXT"],
        "no extension": ["val/b/LICENSE"],
    }


def test_folder_is_listed_once_and_again_for_a_fingerprint(tmp_path):
    config = Data(name=f"folder:{make_folder(tmp_path)}")
    first = open_folder(config)
    assert open_folder(config) is first
    put(tmp_path / "val" / "b" / "new.png")
    before = fingerprint(config)
    assert len(list(open_folder(config).images())) == len(list(first.images())) + 1
    (tmp_path / "val/b/new.png").unlink()
    assert fingerprint(config) != before


def test_folder_that_cannot_be_read_raises(tmp_path, monkeypatch):
    def refuse(path: str = ".") -> Any:
        if str(path).endswith("train/b"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    make_folder(tmp_path)
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", refuse)  # root may read everything
    with pytest.raises(PermissionError, match="train/b"):
        load(tmp_path)


@pytest.mark.parametrize("layout", ["train", "direct"])
def test_hold_out_needs_neither_val_nor_train(tmp_path, layout):
    make_folder(tmp_path, train=8)
    expected = load(tmp_path, hold_out=0.25)
    shutil.rmtree(tmp_path / "val")
    data = load(tmp_path if layout == "train" else tmp_path / "train", hold_out=0.25)
    assert (expected.has_test, data.has_test, data.classes) == (True, False, ("a", "b"))
    assert paths_of(data.train) == paths_of(expected.train)
    ((batch, _),), ((same, _),) = (d.test.test_batches(9) for d in (data, expected))
    assert torch.equal(batch.images, same.images)
    assert not {*paths_of(data.train)} & {*paths_of(data.test)}
    limited = load(tmp_path, hold_out=0.25, limit=6)
    counts = [torch.bincount(split.labels).tolist() for split in (limited.train, limited.test)]
    assert counts == [[3, 3], [2, 2]]


def test_test_folder_stands_in_for_val_and_data_dir_for_the_parent(tmp_path):
    make_folder(tmp_path / "pets")
    (tmp_path / "pets" / "val").rename(tmp_path / "pets" / "test")
    data = load_data(Data(name="folder:pets", size=12), data_dir=str(tmp_path))
    assert (len(data.train), len(data.test), data.channels, data.size) == (12, 6, 3, 12)
    with pytest.raises(FileNotFoundError, match=r"'pets' or '.*other/pets'"):
        load_data(Data(name="folder:pets"), data_dir=str(tmp_path / "other"))


def test_unusable_folders_raise(tmp_path):
    def assert_raises(kind: type[Exception], *words: str, **options: Any) -> None:
        with pytest.raises(kind) as caught:
            load(tmp_path, **options)
        assert all(word in str(caught.value) for word in words)

    assert_raises(FileNotFoundError, "train/", "--data.hold_out 0.2")
    (tmp_path / "val").mkdir()
    assert_raises(FileNotFoundError, "train/", hold_out=0.25)
    (tmp_path / "val").rmdir()
    (tmp_path / "train" / "a").mkdir(parents=True)
    assert_raises(FileNotFoundError, "val/ or test/", "--data.hold_out 0.2")
    (tmp_path / "val").mkdir()
    (tmp_path / "train" / "a" / "1.psd").write_text("")
    assert_raises(ValueError, "train/a/1.psd (extension .psd)", f"{tmp_path / 'val'}")
    put(tmp_path / "train" / "a" / "1.png")
    assert_raises(ValueError, "only 'a'", f"{tmp_path / 'val'}")
    put(tmp_path / "val" / "a" / "1.png")
    (tmp_path / "train" / "b").mkdir()
    assert_raises(ValueError, "none in 'b'")
    put(tmp_path / "train" / "b" / "1.png")
    assert load(tmp_path).classes == ("a", "b")  # val need not have it
    (tmp_path / "val" / "dragon").mkdir()
    assert_raises(ValueError, "'dragon'")


def make_tracks(root: Path, tracks: int) -> Path:
    """Three frames per track, whose numbers begin anew in each class, as in GTSRB."""
    for k, track, frame in np.ndindex(2, tracks, 3):
        put(root / "ab"[k] / f"{track:05d}_{frame:02d}.ppm")
    return root


@pytest.mark.parametrize("pattern", [r"(.+)_\d+\.ppm", r".+/\d{5}"])
def test_images_of_a_group_stay_together(tmp_path, pattern):
    make_tracks(tmp_path, tracks=10)
    data = load(tmp_path, hold_out=0.2, groups=pattern)
    kept, held = ({path[:7] for path in paths_of(split)} for split in (data.train, data.test))
    assert (len(data.train), len(data.test), kept & held) == (48, 12, set())
    assert sorted(track[0] for track in held) == ["a", "a", "b", "b"]
    alone = paths_of(load(tmp_path, hold_out=0.2).test)
    assert len({path[:7] for path in alone}) > 4  # without groups, tracks are torn apart
    across = paths_of(load(tmp_path, hold_out=0.4, groups=r"(\d+)_").test)
    assert (len(across), len({path[2:7] for path in across})) == (24, 4)  # in both classes


def test_unusable_groups_raise(tmp_path):
    make_tracks(tmp_path, tracks=2)
    put(tmp_path / "b" / "extra.png")
    with pytest.raises(ValueError, match=r"`data.groups`.* 1 of 13, .*b/extra.png"):
        load(tmp_path, hold_out=0.5, groups=r"(.+)_\d+")
    with pytest.raises(ValueError, match=r"`data.hold_out`"):
        load(tmp_path, hold_out=0.2, groups="^[ab]")  # each class is one group


@st.composite
def crops(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int, int, int], int]:
    """The size of an image, a box in it, and the size of the result."""
    width, height = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    right, bottom = draw(st.integers(left + 1, width)), draw(st.integers(top + 1, height))
    return (width, height), (left, top, right, bottom), draw(st.integers(1, 40))


@given(crops())
@example(((30, 36), (0, 0, 8, 35), 36))  # exactly 148; PyTorch gives 149 there and Pillow 147
def test_crop_and_resize_are_those_of_pillow(tmp_path_factory, crop):
    shape, box, size = crop
    image = picture(*shape)
    path = put(tmp_path_factory.getbasetemp() / "crop.png", image)
    expected = planes(image.crop(box).resize((size, size), BILINEAR))
    by_torch, by_pillow = (
        read_image(path, lambda w, h: box, size, by_pillow=way).numpy() for way in (False, True)
    )
    assert np.array_equal(by_pillow, expected)
    assert abs(by_torch - expected).max() <= 2  # each rounds twice, after rows and columns


ends = st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted).map(tuple)


@given(st.integers(1, 600), st.integers(1, 600), st.integers(0, 10**6), ends, ends)
def test_random_box_is_inside_and_has_the_ratio(width, height, seed, scale, ratio):
    ratio = 0.1 + 9 * ratio[0], 0.1 + 9 * ratio[1]
    draws = uniform(Stream.AUGMENT, seed, np.arange(22)).tolist()
    left, top, right, bottom = random_box(width, height, draws, scale, ratio)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    w, h = right - left, bottom - top
    # The sides are rounded to whole pixels.
    assert (w - 0.51) / (h + 0.51) <= ratio[1] or w == 1
    assert (w + 0.51) / (h - 0.51) >= ratio[0] or h == 1


def test_random_box_has_the_distribution_of_torchvision():
    draws = uniform(Stream.AUGMENT, 0, np.arange(4000)[:, None], np.arange(22)).tolist()
    boxes = np.array([random_box(4000, 4000, d, (0.1, 0.5), (0.5, 2.0)) for d in draws])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert stats.kstest(w * h / 4000**2, stats.uniform(0.1, 0.4).cdf).pvalue > 1e-3
    assert stats.kstest(np.log2(w / h), stats.uniform(-1, 2).cdf).pvalue > 1e-3
    for begin, room in ((boxes[:, 0], 4000 - w), (boxes[:, 1], 4000 - h)):
        assert stats.kstest((begin + 0.5) / (room + 1), "uniform").pvalue > 1e-3
    for size, box in (((300, 30), (130, 0, 170, 30)), ((30, 300), (0, 130, 30, 170))):
        assert random_box(*size, [0.3] * 22, (0.9, 1.0), (3 / 4, 4 / 3)) == box  # none fits


def test_training_images_equal_those_of_a_loop(tmp_path):
    data = load(make_folder(tmp_path), flip=True, scale=(0.2, 0.9))
    batches = list(data.train.train_batches(5, seed=9, epoch=1))
    assert len(batches) == 2
    mirrored = 0
    for place, i in enumerate(permutation(12, 9, 1)[:10].tolist()):
        draws = uniform(Stream.AUGMENT, 9, 1, i, np.arange(23)).tolist()
        box = random_box(24, 18, draws[1:], (0.2, 0.9), (3 / 4, 4 / 3))
        image = picture(24, 18, seed=100 * (i // 6) + i % 6).crop(box)
        expected = planes(image.resize((12, 12), BILINEAR))
        if draws[0] < 0.5:
            expected, mirrored = expected[..., ::-1], mirrored + 1
        got = batches[place // 5].images[place % 5].numpy()
        assert abs(got - (expected / 255 - MEAN) / STD).max() <= LEVEL
        assert batches[place // 5].labels[place % 5] == i // 6
    assert 0 < mirrored < 10


def test_testing_crops_the_centre_and_resizes_as_pillow(tmp_path):
    image = picture(80, 64)
    for part in ("train/a", "train/b", "val/a"):
        put(tmp_path / part / "x.png", image)
    for size in (28, 25, 90):
        ((batch, _),) = load(tmp_path, size=size).test.test_batches(1)
        centre = planes(image.crop((12, 4, 68, 60)).resize((size, size), BILINEAR))
        assert abs(batch.images[0].numpy() - (centre / 255 - MEAN) / STD).max() < 1e-5
    assert centre_box(500, 375, 0.875) == (86, 23, 414, 351)
    assert centre_box(1, 9, 0.1) == (0, 4, 1, 5)


def test_large_jpegs_are_decoded_small(tmp_path, monkeypatch):
    image = picture(80, 60).resize((640, 480), Image.Resampling.BICUBIC)
    path = put(tmp_path / "x.jpg", image, quality=95)
    decoded = []
    draft = JpegImagePlugin.JpegImageFile.draft

    def spy(self: Any, mode: Any, size: Any) -> Any:
        result = draft(self, mode, size)
        decoded.append(self.size)
        return result

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", spy)
    for box, size, expected in (
        ((0, 0, 640, 480), 60, (80, 60)),
        ((0, 0, 640, 480), 61, (160, 120)),
        ((100, 40, 421, 361), 160, (320, 240)),
        ((100, 40, 260, 200), 160, (640, 480)),
    ):
        got = read_image(path, lambda w, h, box=box: box, size).numpy()
        assert decoded[-1] == expected
        reference = planes(image.crop(box).resize((size, size), BILINEAR))
        assert abs(got - reference).mean() < 1.5  # of 255: two ways to shrink, and JPEG


GREY = np.arange(256, dtype=np.uint8).reshape(16, 16)
COLOUR = np.stack([GREY, GREY.T, 255 - GREY], 2)
WIDE = np.random.default_rng(0).integers(0, 65536, (16, 16), dtype=np.uint16)
RGB, CLEAR = Image.fromarray(COLOUR), Image.fromarray(np.full((16, 16), 77, np.uint8))
PALETTE = RGB.quantize(16)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # the orientation, which is ignored
KINDS: dict[str, tuple[Image.Image, str, dict[str, Any], Any]] = {
    "grey": (Image.fromarray(GREY), "png", {}, GREY),
    "16 bits": (Image.fromarray(WIDE), "png", {}, np.rint(WIDE / 257)),
    "colour": (RGB, "bmp", {}, COLOUR),
    "transparent": (Image.merge("RGBA", (*RGB.split(), CLEAR)), "png", {}, COLOUR),
    "grey, transparent": (Image.merge("LA", (Image.fromarray(GREY), CLEAR)), "png", {}, GREY),
    "palette": (PALETTE, "png", {}, PALETTE.convert("RGB")),
    "clear palette": (PALETTE, "png", {"transparency": bytes(16)}, PALETTE.convert("RGB")),
    "two levels": (Image.fromarray(GREY > 99), "png", {}, 255 * (GREY > 99)),
    "lossless": (RGB, "webp", {"lossless": True}, COLOUR),
    "print": (RGB.convert("CMYK"), "jpg", {"quality": 100, "subsampling": 0}, COLOUR),
    "turned": (RGB, "jpg", {"quality": 100, "subsampling": 0, "exif": TURNED}, COLOUR),
    "frames": (PALETTE, "gif", {}, PALETTE.convert("RGB")),
    "TIFF": (RGB, "tif", {"compression": "tiff_lzw"}, COLOUR),
    "TIFF of 16 bits": (Image.fromarray(WIDE), "tiff", {}, np.rint(WIDE / 257)),
    "TIFF of print": (RGB.convert("CMYK"), "tif", {}, COLOUR),
}


@pytest.mark.parametrize("way", ["train", "test"])
def test_second_epoch_decodes_nothing(tmp_path, monkeypatch, way):
    decoded = []
    real = folder.decode
    monkeypatch.setattr(
        folder, "decode", lambda path, least: decoded.append(path) or real(path, least)
    )
    for k, i in np.ndindex(2, 3):
        for part in ("train", "val"):
            put(tmp_path / part / "ab"[k] / f"{i}.jpg", picture(400, 300, seed=10 * k + i))

    def epoch(number: int, **options: Any) -> torch.Tensor:  # of another run in the same process
        data = load(tmp_path, flip=True, **options)
        if way == "test":
            return torch.cat([batch.images for batch, _ in data.test.test_batches(4)])
        return torch.cat([b.images for b in data.train.train_batches(3, seed=0, epoch=number)])

    first = epoch(0)
    assert len(decoded) == 6
    epoch(1)
    assert len(decoded) == 6
    assert torch.equal(epoch(0), first)
    # Nothing is taken from an image that has changed, or is needed in another size.
    put(tmp_path / "train" / "a" / "0.jpg", picture(400, 300, seed=99))
    put(tmp_path / "val" / "a" / "0.jpg", picture(400, 300, seed=99))
    assert not torch.equal(epoch(0), first)
    assert len(decoded) == 7
    epoch(0, size=14)
    assert len(decoded) == 13
    # Images that do not fit are cut from the whole image; the kept ones differ by their reduction.
    monkeypatch.setattr(folder, "MOST_KEPT", 0)
    whole = epoch(0)
    monkeypatch.setattr(folder, "MOST_KEPT", 512 << 20)
    assert (epoch(0) - whole).abs().mean() < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_is_read(tmp_path, kind):
    image, extension, options, expected = KINDS[kind]
    path = put(tmp_path / f"x.{extension}", image, **options)
    with Image.open(path) as stored:
        assert stored.mode[0] == image.mode[0]
    got = read_image(path, whole, 16).numpy()
    assert abs(got - planes(expected)).max() <= (6 if extension == "jpg" else 0)


@pytest.mark.parametrize(
    ("values", "kind", "low", "high"),
    [
        ([[0, 70_000], [9, 140_000]], np.int32, 0, 140_000),
        ([[-1000, 3000], [0, 1000]], np.int32, -1000, 3000),
        ([[0, 255], [700, 4095]], np.int32, 0, 65535),
        ([[0, 0.25], [0.5, 1]], np.float32, 0, 1),
        ([[0, 1], [128.25, 200]], np.float32, 0, 255),
        ([[0, 256], [30_000, 60_000]], np.float32, 0, 65535),
        ([[-1, 0], [0.5, 1]], np.float32, -1, 1),
        ([[-5, -5], [-5, -5]], np.float32, -5, -4),
    ],
)
def test_wide_values_are_scaled_by_the_whole_image(tmp_path, values, kind, low, high):
    path = put(tmp_path / "x.tif", Image.fromarray(np.array(values, kind)))
    expected = np.rint(255 * (np.array(values, float) - low) / (high - low))
    assert np.array_equal(read_image(path, whole, 2)[0].numpy(), expected)
    assert read_image(path, lambda w, h: (0, 0, 1, 1), 1).item() == expected[0, 0]  # and of a crop


def test_content_decides_the_format_among_the_safe_ones(tmp_path):
    grey = Image.fromarray(np.full((4, 4), 9, np.uint8))
    for name, kind in (("1.png", "GIF"), ("2.jpg", "TIFF"), ("3.bmp", "PPM")):
        assert read_image(put(tmp_path / name, grey, format=kind), whole, 4).max() == 9
    for kind in ("EPS", "ICO", "PDF", "PCX"):
        with pytest.raises(UnidentifiedImageError):
            read_image(put(tmp_path / "4.png", grey, format=kind), whole, 4)
    nan = Image.fromarray(np.array([[0, np.nan]], np.float32))
    with pytest.raises(ValueError, match="not finite"):
        read_image(put(tmp_path / "x.tif", nan), whole, 2)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(("extension", "workers"), [("jpg", 1), ("webp", 0), ("bmp", 0)])
def test_bad_image_raises_with_its_path(tmp_path, extension, workers):
    make_folder(tmp_path, train=2, val=2)
    bad = put(tmp_path / "val" / "b" / f"9.{extension}", picture(64, 64))
    cut_short(bad)
    with pytest.raises(ValueError, match=f"{bad}.*data.bad_images: skip"):
        list(load(tmp_path, workers).test.test_batches(2))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_skipped_with_one_warning_each(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(folder, "MOST_KEPT", 0)  # so that pixels equal those of `read_image`
    make_folder(tmp_path, train=6, val=6)
    bad = [tmp_path / part / file for part in ("train", "val") for file in ("a/2.png", "b/5.png")]
    cut_short(bad[0])
    bad[1].write_bytes(b"")
    cut_short(bad[2])
    bad[3].unlink()
    bad[3].symlink_to("nowhere")
    data = load(tmp_path, workers, bad_images="skip", scale=(1, 1), ratio=(4 / 3, 4 / 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # after JAX
        batches = [b for e in (0, 1) for b in data.train.train_batches(4, seed=0, epoch=e)]
        tested = [b for _ in range(2) for b in data.test.test_batches(5)]
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 4
    assert all(sum(repr(str(path)) in message for message in messages) == 1 for path in bad)
    # In training 2 becomes 3, and the last becomes the first, each with its own label.
    order: list[int] = [i for e in (0, 1) for i in permutation(12, 0, e).tolist()]
    for place, wanted in enumerate(order):
        i = {2: 3, 11: 0}.get(wanted, wanted)
        batch = batches[place // 4]
        pixels = read_image(tmp_path / "train" / "ab"[i // 6] / f"{i % 6}.png", whole, 12).numpy()
        expected = (pixels / 255 - MEAN) / STD
        np.testing.assert_allclose(batch.images[place % 4], expected, rtol=0, atol=1e-5)
        assert batch.labels[place % 4] == i // 6
    # In testing they are left out.
    left = [i for i in range(12) if i not in (2, 11)]
    assert torch.cat([index for _, index in tested]).tolist() == left * 2
    assert [(len(b.images), len(index)) for b, index in tested[:3]] == [(4, 4), (5, 5), (1, 1)]
    assert torch.cat([b.labels for b, _ in tested[:3]]).tolist() == [i // 6 for i in left]


@pytest.mark.filterwarnings("ignore:Skipped")
def test_folder_without_a_readable_image_raises_in_training(tmp_path):
    for path in make_folder(tmp_path, train=1, val=1).rglob("*.png"):
        path.write_bytes(b"")
    data = load(tmp_path, bad_images="skip")
    assert list(data.test.test_batches(2)) == []
    with pytest.raises(ValueError, match=str(tmp_path)):
        list(data.train.train_batches(2, seed=0, epoch=0))


def all_batches(data: Datasets) -> list[torch.Tensor]:
    train = [t for batch in data.train.train_batches(4, seed=3, epoch=2) for t in batch]
    test = [t for (batch, index) in data.test.test_batches(4) for t in (*batch, index)]
    return train + test


def test_threads_change_nothing_and_end(tmp_path):
    make_folder(tmp_path, train=20)
    expected = all_batches(load(tmp_path, flip=True))
    state = torch.get_rng_state()
    for workers in (1, 2):
        got = all_batches(load(tmp_path, workers, flip=True))
        assert all(map(torch.equal, got, expected)), workers
        assert len(got) == len(expected)
    assert torch.equal(torch.get_rng_state(), state)
    taken: list[int] = []
    results = folder.in_threads(abs, (taken.append(i) or i for i in range(9999)), 2)
    assert (next(results), len(taken)) == (0, 2 * folder.AHEAD + 1)
    abandoned = load(tmp_path, 2).train.train_batches(4, seed=0, epoch=0)
    before = threading.active_count()
    next(abandoned)
    assert threading.active_count() == before + 2
    del abandoned
    assert threading.active_count() == before
