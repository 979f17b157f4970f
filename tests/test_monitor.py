"""FilterMonitor and Recording: written, read while written, cut short, and resumed."""

from __future__ import annotations

import datetime
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import start_processes

from powergrad.monitor import FilterMonitor, Recording


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)

    def features(self, batch: Tensor) -> Tensor:
        return self.act(self.first(batch))

    def forward(self, batch: Tensor) -> Tensor:
        return self.last(input=self.features(batch))


def root_mean_square(x: Tensor) -> Tensor:
    return x.detach().square().mean(0).sqrt()


def record(model: Any, folder: Path, steps: Iterable[int] = (0,), **options: Any) -> Recording:
    """Call a monitor at these steps."""
    with FilterMonitor(model, folder, **options) as monitor:
        for step in steps:
            monitor.step(step)
    return Recording(folder)


def reference_norms(module: Any) -> list[float]:
    """The norm of each filter, by loops over numpy arrays and groups, in float64."""
    wide = torch.complex128 if module.weight.is_complex() else torch.float64
    squares = np.abs(module.weight.detach().to(wide).numpy()) ** 2
    if "Transpose" not in type(module).__name__:
        return [float(np.sqrt(square.sum())) for square in squares]
    ins = len(squares) // module.groups
    return [
        float(np.sqrt(squares[group * ins : (group + 1) * ins, unit].sum()))
        for group in range(module.groups)
        for unit in range(squares.shape[1])
    ]


def extreme(dtype: torch.dtype) -> nn.Module:
    layer = nn.Linear(1000, 3)
    layer.weight.data[0] = 300.0  # the square of which overflows in float16
    layer.weight.data[1] = 1e-5  # and of this underflows
    return layer.to(dtype)


# The units of every kind of convolution are in test_clip.py.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 4),
    "grouped": lambda: nn.Conv2d(6, 4, 3, groups=2),
    "transposed grouped": lambda: nn.ConvTranspose2d(6, 9, 3, groups=3),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),  # type: ignore
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
    "complex": lambda: nn.Linear(3, 4, dtype=torch.complex64),
    "float16": lambda: extreme(torch.float16),
    "bfloat16": lambda: extreme(torch.bfloat16),
    "float64": lambda: extreme(torch.float64),
}


def test_norms_of_filters(tmp_path: Path) -> None:
    """Of each layer alone, and of the weights and gradients of all together."""
    torch.manual_seed(0)
    layers = nn.ModuleList(make() for make in LAYERS.values())
    for parameter in layers.parameters():
        parameter.grad = parameter.detach().clone()
    layers[0].get_parameter("weight").grad = None
    recording = record(layers, tmp_path / "all", gradients=True)
    for name, layer in layers.named_children():
        expected = torch.tensor(reference_norms(layer))
        alone = record(layer, tmp_path / name)
        torch.testing.assert_close(alone.read(1)[1][0], expected)
        torch.testing.assert_close(recording.read(name)[1][0], expected)
        if layer is layers[0] or nn.utils.parametrize.is_parametrized(layer):
            expected = torch.full_like(expected, torch.nan)  # there is none, or it is computed
        gradients = recording.read(name, "gradient")[1][0]
        torch.testing.assert_close(gradients, expected, equal_nan=True)


def test_layers_of_resnet18_have_the_numbers_of_the_paper(timm: Any, tmp_path: Path) -> None:
    layers = record(timm.create_model("resnet18"), tmp_path).columns
    assert [layer.number for layer in layers] == list(range(1, 22))
    assert [layer.kind for layer in layers] == ["Conv2d"] * 20 + ["Linear"]
    assert (layers[10].layer, layers[10].units) == ("layer3.0.conv1", 256)
    block = ["layer2.0.conv1", "layer2.0.conv2", "layer2.0.downsample.0", "layer2.1.conv1"]
    assert [layer.layer for layer in layers[5:9]] == block
    assert [layer.normalised for layer in layers] == [True] * 20 + [False]
    # The size that the documentation gives.
    assert (tmp_path / "records.npy").stat().st_size == 192 + 8 + 4 * 5800


def train(model: MLP) -> Iterator[tuple[int, Tensor]]:
    """Some steps; after each, its number and the features of its batch."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 9):
        batch = torch.randn(6 + step, 4, generator=generator)
        features = model.features(batch).detach()
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
        yield step, features


def test_training_is_recorded_and_not_touched(tmp_path: Path) -> None:
    model, plain, seen = MLP(), MLP(), []
    expected: dict[str, list[Tensor]] = {"weight": [], "gradient": [], "feature": []}
    with FilterMonitor(model, tmp_path, every=2, gradients=True, features=True) as monitor:
        monitor.step(0)
        for step, features in train(model):
            model.eval()(torch.full((3, 4), 1e6))  # an evaluation in between is not counted
            model.train()
            monitor.step(step)
            seen.append(features)
            if step % 2 == 0:
                weight: Any = model.first.weight
                expected["weight"].append(weight.detach().norm(dim=1))
                expected["gradient"].append(weight.grad.norm(dim=1))
                expected["feature"].append(root_mean_square(torch.cat(seen[-2:])))
    assert len(list(train(plain))) == 8
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert not model.last._forward_pre_hooks
    recording = Recording(tmp_path)
    for quantity, layer in (("weight", 1), ("gradient", "first"), ("feature", "last")):
        steps, values = recording.read(layer, quantity)
        assert steps.tolist() == [0, 2, 4, 6, 8]
        torch.testing.assert_close(values[1:], torch.stack(expected[quantity]))
        assert values[0].isnan().all() == (quantity != "weight")


def test_gains_are_recorded_beside_the_rest(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 1),
        nn.BatchNorm2d(3),
        nn.GroupNorm(1, 3, affine=False),
        nn.Conv2d(3, 4, 1),
        nn.LayerNorm(4),
        nn.LayerNorm([2, 4]),  # its gains are not of channels
    )
    gains, values = model[1].get_parameter("weight"), []
    with FilterMonitor(model, tmp_path, every=1, gains=True) as monitor:
        for step in range(2):
            values.append(nn.init.normal_(gains).detach().abs())
            monitor.step(step)
    recording = Recording(tmp_path)
    shown = [(column.quantity, column.layer) for column in recording.columns]
    assert shown == [("weight", "0"), ("weight", "3"), ("gain", "1"), ("gain", "4")]
    assert torch.equal(recording.read("1", "gain")[1], torch.stack(values))
    assert torch.equal(recording.read("4", "gain")[1], torch.ones(2, 4))


def test_features_of_a_convolutional_classifier(tmp_path: Path) -> None:
    first = nn.Conv2d(3, 4, 1)
    model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(4, 2, 1))
    batch = torch.randn(5, 3, 6, 6)
    with FilterMonitor(model, tmp_path, features="2") as monitor:
        model(batch)
        monitor.step(0)
    expected = root_mean_square(first(batch).relu().movedim(1, -1).flatten(0, -2))
    torch.testing.assert_close(Recording(tmp_path).read(2, "feature")[1][0], expected)


def test_wrappers_record_the_same(tmp_path: Path) -> None:
    model, inside = MLP(), MLP()
    inside.add_module("last", torch.compile(inside.last))  # type: ignore[arg-type]
    compiled: Any = torch.compile(nn.DataParallel(model))
    files = set()
    for wrapper in (model, nn.DataParallel(model), torch.compile(model), compiled, inside):
        record(wrapper, folder := tmp_path / str(len(list(tmp_path.iterdir()))))
        files.add(tuple((folder / name).read_bytes() for name in ("index.json", "records.npy")))
    assert len(files) == 1


def test_features_of_a_compiled_model_and_not_of_its_copy(tmp_path: Path) -> None:
    model = MLP()
    with FilterMonitor(model, tmp_path, every=1, features=True) as monitor:
        average = torch.optim.swa_utils.AveragedModel(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for step in range(3):
            batch = torch.randn(4, 4)
            compiled(batch)
            average.train()(100 * batch)  # must not be counted
            monitor.step(step)
            _, values = Recording(tmp_path).read(2, "feature")
            torch.testing.assert_close(values[step], root_mean_square(model.features(batch)))


def write_rows(folder: Path, steps: list[int], resume: int | None = None) -> None:
    """Add a row per step, in which the norms of layer 2 are those of weights `step + 1`."""
    model = MLP()
    with FilterMonitor(model, folder, every=1, resume=resume) as monitor:
        for step in steps:
            model.last.weight.data.fill_(step + 1)
            monitor.step(step)


def rows_of(steps: list[int]) -> Tensor:
    weights = torch.tensor(steps, dtype=torch.float32)[:, None] + 1
    return (5**0.5 * weights).expand(-1, 3)


STEPS = st.sets(st.integers(0, 40), min_size=1, max_size=8).map(sorted)


@given(steps=STEPS, resume=st.integers(0, 45), data=st.data())
def test_file_cut_at_any_byte_is_read_and_resumed(tmp_path_factory, steps, resume, data) -> None:
    """Whole records are read. Those up to the step `resume` are kept, the others written again."""
    folder = tmp_path_factory.mktemp("cut")
    write_rows(folder, steps)
    path = folder / "records.npy"
    whole = path.read_bytes()
    size = (len(whole) - 192) // len(steps)
    cut = data.draw(st.integers(192, len(whole)))
    path.write_bytes(whole[:cut])
    complete = steps[: (cut - 192) // size]
    later = [step for step in steps if step > resume]
    for now in (complete, [step for step in complete if step <= resume] + later):
        recorded, values = Recording(folder).read(2)
        assert recorded.tolist() == now == Recording(folder).load()[0].tolist()
        torch.testing.assert_close(values, rows_of(now))
        write_rows(folder, later, resume)
        if set(complete) | set(later) == set(steps):
            assert path.read_bytes() == whole


def write_forever(folder: Path) -> None:
    model = nn.Linear(3, 50000)
    with torch.no_grad(), FilterMonitor(model, folder, every=1) as monitor:
        for step in itertools.count():
            model.weight.fill_(step)
            monitor.step(step)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("least", [1, 8, 40])
def test_records_written_before_a_kill_are_whole_and_the_run_resumes(least, tmp_path) -> None:
    """Numpy alone reads the records that were finished, during the run and after it."""
    path, rows = tmp_path / "records.npy", np.empty(0)
    process = multiprocessing.get_context("fork").Process(target=write_forever, args=(tmp_path,))
    process.start()
    try:
        while len(rows) < least:
            if Recording.exists(tmp_path):
                rows = np.load(path)
    finally:
        process.kill()
        process.join()
    after = np.load(path)
    assert (after[: len(rows)] == rows).all()
    assert (
        after["step"].tolist() == list(range(len(after))) == Recording(tmp_path).read(1)[0].tolist()
    )
    norms = np.broadcast_to(np.float32(3**0.5) * after["step"][:, None], after["values"].shape)
    np.testing.assert_allclose(after["values"], norms, 1e-6)
    with FilterMonitor(nn.Linear(3, 50000), tmp_path, every=1, resume=least - 1) as monitor:
        monitor.step(least)
    assert np.load(path)["step"].tolist() == list(range(least + 1))


def test_numpy_reads_it_as_documented(tmp_path: Path) -> None:
    with FilterMonitor(MLP(), tmp_path, every=1):
        assert Recording(tmp_path).read(1)[1].shape == (0, 5)
        assert np.load(tmp_path / "records.npy").shape == (0,)
    write_rows(tmp_path, [1, 3, 2**40], resume=0)
    rows = np.load(tmp_path / "records.npy", mmap_mode="r")
    assert rows["step"].tolist() == [1, 3, 2**40]
    columns = json.loads((tmp_path / "index.json").read_text())["columns"]
    (column,) = [c for c in columns if (c["layer"], c["quantity"]) == ("last", "weight")]
    values = rows["values"][:, column["start"] :][:, : column["units"]]
    np.testing.assert_allclose(values, rows_of([1, 3, 2**40]), rtol=1e-6)


def test_zeros_left_by_a_power_cut_are_not_read(tmp_path: Path) -> None:
    write_rows(tmp_path, [0, 1, 2])
    path = tmp_path / "records.npy"
    whole = path.read_bytes()
    size = (len(whole) - 192) // 3
    path.write_bytes(whole[:-size] + bytes(size))
    assert Recording(tmp_path).read(1)[0].tolist() == [0, 1]
    FilterMonitor(MLP(), tmp_path, resume=5).close()
    assert np.load(path)["step"].tolist() == [0, 1]


def test_a_resuming_run_does_not_disturb_a_reader(tmp_path: Path) -> None:
    layer = nn.Linear(3, 9000)
    steps, values = record(layer, tmp_path, range(6), every=1).load()
    before = values.clone()
    FilterMonitor(layer, tmp_path, resume=2).close()
    assert steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(values, before)
    assert len(Recording(tmp_path).load()[0]) == 3


@pytest.mark.parametrize("resume", [None, 2])
def test_every_and_the_first_call(resume: int | None, tmp_path: Path) -> None:
    recording = record(MLP(), tmp_path, range(3, 14), every=4, resume=resume)
    assert recording.read(1)[0].tolist() == [3, 4, 8, 12]


class Full:
    """A file on a disk that is full after so many writes."""

    def __init__(self, file: Any, times: int) -> None:
        self.file, self.times, self.seek, self.flush = file, times, file.seek, file.flush

    def write(self, data: Any) -> None:
        self.times -= 1
        if self.times < 0:
            raise OSError(28, "No space left on device")
        self.file.write(data)


@pytest.mark.parametrize("times", [0, 1])
def test_a_record_counts_only_when_all_of_it_is_written(times: int, tmp_path: Path) -> None:
    """Its values are written first, then the header, which counts the records."""
    with FilterMonitor(MLP(), tmp_path, every=1) as monitor:
        monitor.step(0)
        file: Any = monitor._file
        monitor._file = Full(file, times)  # type: ignore[assignment]
        with pytest.raises(OSError, match="No space"):
            monitor.step(1)
        monitor._file = file
        assert Recording(tmp_path).read(1)[0].tolist() == [0]
        monitor.step(1)
        monitor.step(2)
    assert Recording(tmp_path).read(1)[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_features_seen_before_a_stop_are_not_lost(stop: int, tmp_path: Path) -> None:
    model, batches = MLP(), torch.randn(8, 5, 4)
    monitor = FilterMonitor(model, tmp_path, every=4, features=True)
    monitor.step(0)
    for step, batch in enumerate(batches, start=1):
        model(batch)
        monitor.step(step)
        if step == stop:
            kept = monitor.state_dict()
            monitor.close()
            monitor = FilterMonitor(model, tmp_path, every=4, features=True, resume=step)
            monitor.load_state_dict(kept)
    monitor.close()
    expected = [root_mean_square(model.features(part).flatten(0, 1)) for part in batches.split(4)]
    _, values = Recording(tmp_path).read("last", "feature")
    torch.testing.assert_close(values[1:], torch.stack(expected))


def train_rank(rank: int, folder: str) -> None:
    """Train and monitor as one of two processes, and keep the norms of the last layer."""
    store, limit = f"file://{folder}/store", datetime.timedelta(seconds=100)
    distributed.init_process_group("gloo", store, limit, world_size=2, rank=rank)
    model = nn.parallel.DistributedDataParallel(MLP())
    options: Any = {"every": 1, "gradients": True, "features": True}
    with FilterMonitor(model, f"{folder}/norms", **options) as monitor:
        monitor.step(0)
        for step in range(1, 4):
            model.zero_grad()
            model(torch.full((2, 4), 1.0 + rank)).square().sum().backward()
            for parameter in model.parameters():
                parameter.data -= 0.1 * parameter.grad  # type: ignore[operator]
            monitor.step(step)
    distributed.barrier()
    if rank == 0:
        torch.save(model.module.last.weight.detach().norm(dim=1), f"{folder}/final.pt")
    distributed.destroy_process_group()


@pytest.mark.matrix
def test_rank_0_writes_under_distributed_data_parallel(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start_processes(train_rank, (str(tmp_path),), 2, start_method="spawn")
    recording = Recording(tmp_path)  # the run's folder, which has the recording as `norms`
    steps, norms = recording.read("last")
    assert steps.tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(norms[-1], torch.load(tmp_path / "final.pt"))
    for quantity in ("gradient", "feature"):
        assert recording.read("last", quantity)[1][1:].isfinite().all()


def test_steps_must_increase(tmp_path: Path) -> None:
    with FilterMonitor(MLP(), tmp_path, every=2) as monitor:
        monitor.step(3)
        monitor.step(np.int64(5))  # type: ignore[arg-type]  # not recorded, but seen
        for step in (5, 4, 0, -1):
            with pytest.raises(ValueError, match="`step`"):
                monitor.step(step)
        with pytest.raises(TypeError, match="`step`"):
            monitor.step(7.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="closed"):
        monitor.step(9)
    monitor.close()  # twice is once
    with FilterMonitor(MLP(), tmp_path, resume=5) as monitor:
        with pytest.raises(ValueError, match="`step`"):
            monitor.step(5)
        monitor.step(6)


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"every": 0}, ValueError, "`every`"),
        ({"every": True}, TypeError, "`every`"),
        ({"resume": -1}, ValueError, "`resume`"),
        ({"model": []}, TypeError, "`model`"),
        ({"model": nn.ReLU()}, ValueError, "ReLU"),
        ({"model": nn.LazyLinear(3)}, ValueError, "LazyLinear"),
        ({"features": "head"}, ValueError, "'head'"),
        ({"features": "act"}, ValueError, "`features`.*ReLU"),
    ],
)
def test_bad_arguments_raise(arguments: Any, error: type[Exception], word: str, tmp_path) -> None:
    with pytest.raises(error, match=word):
        FilterMonitor(**{"model": MLP(), "directory": tmp_path, **arguments})
    assert not list(tmp_path.iterdir())  # nothing was begun


def test_gradients_that_were_zeroed_raise(tmp_path: Path) -> None:
    model = MLP()
    with FilterMonitor(model, tmp_path, every=1, gradients=True) as monitor:
        monitor.step(0)
        model(torch.ones(1, 4)).sum().backward()
        model.zero_grad()
        with pytest.raises(RuntimeError, match="zero_grad"):
            monitor.step(1)
    assert len(Recording(tmp_path).load()[0]) == 1


def test_another_recording_is_not_overwritten(tmp_path: Path) -> None:
    write_rows(tmp_path, [0, 1])
    before = (tmp_path / "records.npy").read_bytes()
    other = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    for arguments, word in (
        ({}, "`resume`"),
        ({"gradients": True, "resume": 1}, "quantities"),
        ({"model": other, "resume": 1}, "layers"),
    ):
        with pytest.raises(ValueError, match=word):
            FilterMonitor(**{"model": MLP(), "directory": tmp_path, **arguments})  # type: ignore
    assert (tmp_path / "records.npy").read_bytes() == before


def test_what_cannot_be_read_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recording"):
        Recording(tmp_path / "nowhere")
    write_rows(tmp_path, [0])
    for layer, quantity in ((3, "weight"), ("act", "weight"), (1, "gradient"), (0, "weight")):
        with pytest.raises(ValueError, match=f"{layer!r} and '{quantity}'"):
            Recording(tmp_path).read(layer, quantity)
    path = tmp_path / "index.json"
    columns = json.loads(path.read_text())["columns"]
    for version in ({"format": 1, "columns": columns}, {}, [], None):
        path.write_text("{" if version is None else json.dumps(version))
        with pytest.raises(ValueError, match="of format 2" if version is not None else "line 1"):
            Recording(tmp_path)
    path.write_text(json.dumps({"format": 2, "columns": columns[:1]}))
    with pytest.raises(ValueError, match=r"records\.npy.* to fit"):
        len(Recording(tmp_path).load()[0])
