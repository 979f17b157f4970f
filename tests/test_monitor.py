"""FilterMonitor and Recording: written, read while written, cut short, and resumed."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from powergrad.monitor import FilterMonitor, Recording
from powergrad.monitor.layers import filter_norms


def reference_norms(module: nn.Module) -> list[float]:
    """The norm of each filter, by loops over numpy arrays and groups, in float64."""
    weight = module.weight.detach().to("cpu", torch.float64).numpy()  # type: ignore[union-attr]
    if not isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return [float(np.sqrt((weight[unit] ** 2).sum())) for unit in range(len(weight))]
    ins, outs = len(weight) // module.groups, weight.shape[1]
    return [
        float(np.sqrt((weight[group * ins : (group + 1) * ins, unit] ** 2).sum()))
        for group in range(module.groups)
        for unit in range(outs)
    ]


LAYERS = {
    "linear": lambda: nn.Linear(5, 4),
    "conv1d": lambda: nn.Conv1d(3, 5, 3),
    "conv2d": lambda: nn.Conv2d(3, 4, 3, bias=False),
    "conv3d": lambda: nn.Conv3d(2, 3, 2),
    "grouped": lambda: nn.Conv2d(6, 4, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(6, 12, 3, groups=6),
    "transposed1d": lambda: nn.ConvTranspose1d(4, 6, 3, groups=2),
    "transposed": lambda: nn.ConvTranspose2d(6, 4, 3),
    "transposed grouped": lambda: nn.ConvTranspose2d(6, 9, 3, groups=3),
    "transposed3d": lambda: nn.ConvTranspose3d(2, 3, 2),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
    "complex": lambda: nn.Linear(3, 4, dtype=torch.complex64),
}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.act = nn.ReLU()
        self.last = nn.Linear(5, 3)

    def features(self, batch: Tensor) -> Tensor:
        return self.act(self.first(batch))

    def forward(self, batch: Tensor) -> Tensor:
        return self.last(self.features(batch))


def mlp() -> MLP:
    torch.manual_seed(0)
    return MLP()


# What is recorded ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "complex"])
def test_a_filter_is_what_makes_an_output_channel(kind: str, tmp_path: Path) -> None:
    layer = LAYERS[kind]()
    with FilterMonitor(layer, tmp_path) as monitor:
        monitor.step(0)
    _, norms = Recording(tmp_path).read(1)
    torch.testing.assert_close(norms[0], torch.tensor(reference_norms(layer)))


def test_the_norm_of_a_transposed_filter_is_that_of_what_the_channel_depends_on() -> None:
    """Another oracle: zero the weights that an output channel reads, and its norm is zero."""
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(6, 9, 3, groups=3, bias=False)
    for unit in range(9):
        output = layer(torch.randn(1, 6, 4, 4))[0, unit].sum()
        (used,) = torch.autograd.grad(output, layer.weight)
        without = torch.where(used != 0, 0.0, layer.weight.detach())
        assert filter_norms([without], [3])[0].nonzero().flatten().tolist() == [
            other for other in range(9) if other != unit
        ]


def test_complex_weights_have_norms(tmp_path: Path) -> None:
    layer = LAYERS["complex"]()
    with FilterMonitor(layer, tmp_path) as monitor:
        monitor.step(0)
    expected = layer.weight.detach().abs().square().sum(1).sqrt()
    torch.testing.assert_close(Recording(tmp_path).read(1)[1][0], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_dtype_is_summed_in_float32_or_wider(dtype: torch.dtype, tmp_path: Path) -> None:
    layer = nn.Linear(1000, 3).to(dtype)
    with torch.no_grad():
        layer.weight[0] = 300.0  # the square of which overflows in float16
        layer.weight[1] = 1e-5  # and of this underflows
    with FilterMonitor(layer, tmp_path) as monitor:
        monitor.step(0)
    torch.testing.assert_close(
        Recording(tmp_path).read(1)[1][0], torch.tensor(reference_norms(layer))
    )


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
            )


class ResNet18(nn.Module):
    """The modules of a ResNet-18, registered as the common implementations do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(Block(64, 64), Block(64, 64))
        self.layer2 = nn.Sequential(Block(64, 128), Block(128, 128))
        self.layer3 = nn.Sequential(Block(128, 256), Block(256, 256))
        self.layer4 = nn.Sequential(Block(256, 512), Block(512, 512))
        self.fc = nn.Linear(512, 1000)


def test_resnet18_has_the_numbering_of_the_paper(tmp_path: Path) -> None:
    with FilterMonitor(ResNet18(), tmp_path) as monitor:
        monitor.step(0)
    layers = Recording(tmp_path).layers
    assert [layer.number for layer in layers] == list(range(1, 22))
    assert sum(layer.kind == "Conv2d" for layer in layers) == 20
    assert (layers[10].name, layers[10].units) == ("layer3.0.conv1", 256)
    assert [layer.name for layer in layers[5:9]] == [
        "layer2.0.conv1",
        "layer2.0.conv2",
        "layer2.0.downsample.0",
        "layer2.1.conv1",
    ]
    assert layers[20].name == "fc"
    assert [layer.normalised for layer in layers] == [True] * 20 + [False]
    # The size that the documentation gives.
    assert (tmp_path / "records.bin").stat().st_size == 8 + 4 * 5800 == 23_208


def test_every_and_the_first_call(tmp_path: Path) -> None:
    with FilterMonitor(mlp(), tmp_path, every=4) as monitor:
        for step in range(3, 14):
            monitor.step(step)
    assert Recording(tmp_path).read(1)[0].tolist() == [3, 4, 8, 12]


def test_gradients_features_and_weights_of_a_real_training(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected: dict[str, list[Tensor]] = {"weight": [], "gradient": [], "feature": []}
    seen: list[Tensor] = []
    with FilterMonitor(model, tmp_path, every=2, gradients=True, features=True) as monitor:
        monitor.step(0)
        for step in range(1, 9):
            batch = torch.randn(6 + step, 4)
            with torch.no_grad():
                seen.append(model.features(batch))
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
            model.eval()
            model(torch.full((3, 4), 1e6))  # an evaluation in between is not counted
            model.train()
            monitor.step(step)
            if step % 2 == 0:
                weight, gradient = model.first.weight.detach(), model.first.weight.grad
                assert gradient is not None
                expected["weight"].append(weight.square().sum(1).sqrt())
                expected["gradient"].append(gradient.square().sum(1).sqrt())
                expected["feature"].append(torch.cat(seen).square().mean(0).sqrt())
                seen.clear()
    recording = Recording(tmp_path)
    for quantity, layer in (("weight", 1), ("gradient", "first"), ("feature", "last")):
        steps, values = recording.read(layer, quantity)
        assert steps.tolist() == [0, 2, 4, 6, 8]
        torch.testing.assert_close(values[1:], torch.stack(expected[quantity]))
        assert values[0].isnan().all() == (quantity != "weight")
    assert not model.last._forward_pre_hooks  # closing removed it


def test_gains_are_recorded_beside_the_rest(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.GroupNorm(1, 3, affine=False), nn.Conv2d(3, 4, 1)
    )
    model.append(nn.LayerNorm(4))
    model.append(nn.LayerNorm([2, 4]))  # its gains are not of channels
    gains = nn.init.normal_(model[1].get_parameter("weight"))
    start = gains.detach().clone()
    with FilterMonitor(model, tmp_path, every=1, gradients=True, gains=True) as monitor:
        monitor.step(0)
        nn.init.normal_(gains)
        for layer in (model[0], model[3]):
            layer.get_parameter("weight").grad = torch.ones_like(layer.get_parameter("weight"))
        monitor.step(1)
    recording = Recording(tmp_path)
    assert [layer.name for layer in recording.layers] == ["0", "3"]
    assert [layer.name for layer in recording.normalisations] == ["1", "4"]
    steps, values = recording.read("1", "gain")
    assert steps.tolist() == [0, 1]
    assert torch.equal(values, torch.stack([start, gains.detach()]).abs())
    assert torch.equal(recording.read("4", "gain")[1], torch.ones(2, 4))
    torch.testing.assert_close(recording.read(2, "gradient")[1][1], torch.full((4,), 3.0).sqrt())
    with pytest.raises(ValueError, match="a recorded quantity"):
        recording.read("0", "gain")
    with pytest.raises(ValueError, match="other width"):
        FilterMonitor(model, tmp_path, gradients=True, resume=1)


def test_features_of_a_convolutional_classifier(tmp_path: Path) -> None:
    first = nn.Conv2d(3, 4, 1)
    model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(4, 2, 1))
    batch = torch.randn(5, 3, 6, 6)
    with FilterMonitor(model, tmp_path, features="2") as monitor:
        model(batch)
        monitor.step(0)
    expected = first(batch).relu().detach().square().mean((0, 2, 3)).sqrt()
    torch.testing.assert_close(Recording(tmp_path).read(2, "feature")[1][0], expected)


def test_a_frozen_layer_has_no_gradient_to_record(tmp_path: Path) -> None:
    model = mlp()
    model.first.requires_grad_(False)
    model(torch.ones(2, 4)).sum().backward()
    with FilterMonitor(model, tmp_path, gradients=True) as monitor:
        monitor.step(0)
    recording = Recording(tmp_path)
    assert recording.read(1, "gradient")[1].isnan().all()
    assert not recording.read(2, "gradient")[1].isnan().any()


def test_the_same_names_under_wrappers(tmp_path: Path) -> None:
    model = mlp()
    inside = mlp()
    inside.add_module("last", torch.compile(inside.last))  # type: ignore[arg-type]
    wrapped = {
        "plain": model,
        "parallel": nn.DataParallel(model),
        "compiled": torch.compile(model),
        "both": torch.compile(nn.DataParallel(model)),
        "inside": inside,
    }
    for name, wrapper in wrapped.items():
        with FilterMonitor(wrapper, tmp_path / name) as monitor:  # type: ignore[arg-type]
            monitor.step(0)
        assert (tmp_path / name / "index.json").read_bytes() == (
            tmp_path / "plain" / "index.json"
        ).read_bytes()
        assert torch.equal(
            Recording(tmp_path / name).read(2)[1], Recording(tmp_path / "plain").read(2)[1]
        )


def test_features_in_a_compiled_model(tmp_path: Path) -> None:
    model = mlp()
    with FilterMonitor(model, tmp_path, every=1, features=True) as monitor:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for step in range(3):
            batch = torch.randn(4, 4)
            compiled(batch)
            monitor.step(step)
            _, values = Recording(tmp_path).read(2, "feature")
            expected = model.features(batch).detach().square().mean(0).sqrt()
            torch.testing.assert_close(values[step], expected)


def test_training_is_not_touched(tmp_path: Path) -> None:
    """The same losses to the last bit, and no gradient or graph kept."""

    def train(folder: Path | None) -> list[float]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = folder and FilterMonitor(folder and model, folder, every=1, features=True)
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4) * step).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if monitor:
                monitor.step(step)
        if monitor:
            monitor.close()
        return losses

    assert train(None) == train(tmp_path)


# Reading ------------------------------------------------------------------------------------------


def write_rows(folder: Path, steps: list[int], every: int = 1) -> list[Tensor]:
    """A recording in which each row has other values; returns those of layer 2."""
    model, rows = mlp(), []
    with FilterMonitor(model, folder, every=every) as monitor:
        for step in steps:
            with torch.no_grad():
                model.last.weight.fill_(step + 1)
            rows.append(model.last.weight.detach().norm(dim=1))
            monitor.step(step)
    return rows


def test_reading_while_it_is_written(tmp_path: Path) -> None:
    model = mlp()
    with FilterMonitor(model, tmp_path, every=1) as monitor:
        recording = Recording(tmp_path)
        assert len(recording) == 0
        assert recording.read(1)[1].shape == (0, 5)
        for step in range(5):
            monitor.step(step)
            assert len(recording) == step + 1
            assert recording.read(1)[0].tolist() == list(range(step + 1))
            assert [row for row, _ in recording] == list(range(step + 1))


def test_numpy_reads_it_in_two_lines(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, [0, 3, 7])
    index = json.loads((tmp_path / "index.json").read_text())
    row = np.dtype([("step", "<i8"), ("values", "<f4", index["width"])])
    read = np.fromfile(tmp_path / "records.bin", row)
    assert read["step"].tolist() == [0, 3, 7]
    column = next(c for c in index["columns"] if c["layer"] == "last" and c["quantity"] == "weight")
    place = slice(column["start"], column["start"] + column["count"])
    np.testing.assert_array_equal(read["values"][:, place], torch.stack(rows).numpy())


def test_a_row_cut_at_any_byte_is_left_out_and_written_again(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, [0, 1, 2])
    whole = (tmp_path / "records.bin").read_bytes()
    size = len(whole) // 3
    for cut in range(2 * size, 3 * size):
        (tmp_path / "records.bin").write_bytes(whole[:cut])
        steps, values = Recording(tmp_path).read(2)
        assert steps.tolist() == [0, 1]
        assert torch.equal(values, torch.stack(rows[:2]))
        model = mlp()
        with torch.no_grad():
            model.last.weight.fill_(3)
        with FilterMonitor(model, tmp_path, every=1, resume=1) as monitor:
            monitor.step(2)
        assert (tmp_path / "records.bin").read_bytes() == whole


@given(
    steps=st.sets(st.integers(0, 40), min_size=1, max_size=8).map(sorted),
    resume=st.integers(0, 45),
    torn=st.integers(0, 30),
)
def test_resuming_keeps_what_came_before_and_drops_the_rest(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], resume: int, torn: int
) -> None:
    folder = tmp_path_factory.mktemp("resume")
    rows = write_rows(folder, steps)
    with open(folder / "records.bin", "ab") as file:
        file.write(b"\1" * torn)
    model = mlp()
    with FilterMonitor(model, folder, every=1, resume=resume) as monitor:
        monitor.step(resume + 1)
    recorded, values = Recording(folder).read(2)
    kept = [step for step in steps if step <= resume]
    assert recorded.tolist() == [*kept, resume + 1]
    if kept:
        assert torch.equal(values[:-1], torch.stack(rows[: len(kept)]))
    assert torch.equal(values[-1], model.last.weight.detach().norm(dim=1))


def test_a_run_killed_and_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    def train(folder: Path, resume: int | None, until: int) -> None:
        model = mlp()
        with FilterMonitor(model, folder, every=2, resume=resume) as monitor:
            for step in range(until + 1):
                with torch.no_grad():
                    model.first.weight.mul_(0.9)
                if resume is None or step > resume:
                    monitor.step(step)

    train(tmp_path / "once", None, 20)
    train(tmp_path / "twice", None, 13)
    train(tmp_path / "twice", 9, 20)
    for name in ("index.json", "records.bin"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


def test_zeros_left_by_a_power_cut_are_refused_by_readers_and_cut_by_resuming(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path, [0, 1, 2])
    path = tmp_path / "records.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[: 2 * len(whole) // 3] + bytes(len(whole) // 3))
    with pytest.raises(ValueError, match=r"steps to increase .* got 0 after 1 in row 2"):
        Recording(tmp_path).read(1)
    FilterMonitor(mlp(), tmp_path, resume=5).close()
    assert Recording(tmp_path).read(1)[0].tolist() == [0, 1]


def test_a_file_cut_by_a_resuming_run_ends_the_reading(tmp_path: Path) -> None:
    layer = nn.Linear(3, 9000)  # a row is larger than what a file reads ahead
    with FilterMonitor(layer, tmp_path, every=1) as monitor:
        for step in range(6):
            monitor.step(step)
    rows = iter(Recording(tmp_path))
    assert next(rows)[0] == 0
    FilterMonitor(layer, tmp_path, resume=2).close()
    assert [step for step, _ in rows] == [1, 2]


def test_resuming_where_nothing_was_recorded_begins(tmp_path: Path) -> None:
    with FilterMonitor(mlp(), tmp_path, every=10, resume=7) as monitor:
        monitor.step(8)
        monitor.step(10)
    assert Recording(tmp_path).read(1)[0].tolist() == [8, 10]


def test_a_write_that_failed_does_not_shift_the_rows_after_it(tmp_path: Path) -> None:
    """As when the disk is full for a while: part of a row is written, then an error."""
    model = mlp()
    with FilterMonitor(model, tmp_path, every=1) as monitor:
        monitor.step(0)
        file = monitor._file

        class Full:
            def seek(self, place: int) -> None:
                file.seek(place)

            def write(self, row: Any) -> int:
                file.write(row[:5])
                raise OSError(28, "No space left on device")

        monitor._file = Full()  # type: ignore[assignment]
        with pytest.raises(OSError, match="No space"):
            monitor.step(1)
        monitor._file = file
        assert Recording(tmp_path).read(1)[0].tolist() == [0]
        monitor.step(1)
        monitor.step(2)
    assert Recording(tmp_path).read(1)[0].tolist() == [0, 1, 2]


def test_short_writes_are_completed(tmp_path: Path) -> None:
    with FilterMonitor(mlp(), tmp_path, every=1) as monitor:
        file = monitor._file

        class Slow:
            def seek(self, place: int) -> None:
                file.seek(place)

            def write(self, row: Any) -> int:
                return file.write(row[:7]) or 0

        monitor._file = Slow()  # type: ignore[assignment]
        monitor.step(0)
        monitor._file = file
    assert Recording(tmp_path).read(1)[0].tolist() == [0]


def test_memory_is_one_row(tmp_path: Path) -> None:
    """What the monitor holds does not grow with the records."""

    def held(monitor: FilterMonitor) -> int:
        return sum(sys.getsizeof(value) for value in vars(monitor).values())

    with FilterMonitor(mlp(), tmp_path, every=1, features=True) as monitor:
        monitor.step(0)
        before = held(monitor)
        for step in range(1, 200):
            monitor.step(step)
        assert held(monitor) == before


def test_a_process_killed_at_any_time_leaves_whole_rows(tmp_path: Path) -> None:
    script = """
        import itertools, sys, torch
        from powergrad.monitor import FilterMonitor
        monitor = FilterMonitor(torch.nn.Linear(3, 2000), sys.argv[1], every=1)
        for step in itertools.count():
            monitor.step(step)
            if step == 100:
                print("ready", flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert len(Recording(tmp_path)) > 100  # read while the other process writes
    finally:
        process.kill()
        process.communicate(timeout=30)
    steps, norms = Recording(tmp_path).read(1)
    assert steps.tolist() == list(range(len(steps)))
    assert (norms == norms[0]).all()


# Several processes --------------------------------------------------------------------------------


def test_rank_0_writes_under_distributed_data_parallel(tmp_path: Path, monkeypatch: Any) -> None:
    """Rank 0 is this process, which has loaded PyTorch already; rank 1 is another."""
    script = """
        import datetime, torch, torch.distributed as dist
        from powergrad.monitor import FilterMonitor
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=2,
            timeout=datetime.timedelta(seconds=100),
        )
        try:
            torch.manual_seed(0)
            model = torch.nn.parallel.DistributedDataParallel(
                torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
            )
            with FilterMonitor(
                model, f"{folder}/norms", every=1, gradients=True, features=True
            ) as monitor:
                monitor.step(0)
                for step in range(1, 4):
                    model.zero_grad()
                    model(torch.full((2, 4), 1.0 + rank)).square().sum().backward()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter -= 0.1 * parameter.grad
                    monitor.step(step)
            dist.barrier()
        finally:
            dist.destroy_process_group()
    """
    script = textwrap.dedent(script)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    other = subprocess.Popen(
        [sys.executable, "-c", f"rank, folder = 1, {str(tmp_path)!r}\n{script}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
    )
    names: dict[str, Any] = {"rank": 0, "folder": str(tmp_path)}
    try:
        exec(script, names)
        _, errors = other.communicate(timeout=100)
        assert other.returncode == 0, errors.decode()
    finally:
        other.kill()
        other.wait()
    recording = Recording(tmp_path)  # the run's folder, which has the recording as `norms`
    steps, norms = recording.read("2")
    assert steps.tolist() == [0, 1, 2, 3]
    final = names["model"].module[2].weight.detach()
    torch.testing.assert_close(norms[-1], final.norm(dim=1))
    assert recording.read("2", "gradient")[1][1:].isfinite().all()
    assert recording.read("2", "feature")[1][1:].isfinite().all()


# Errors -------------------------------------------------------------------------------------------


def test_steps_must_increase(tmp_path: Path) -> None:
    with FilterMonitor(mlp(), tmp_path, every=2) as monitor:
        monitor.step(3)
        for step in (3, 2, 0):
            with pytest.raises(ValueError, match=f"`step` to be larger than 3, but got {step}"):
                monitor.step(step)
        monitor.step(5)  # not recorded, but seen
        with pytest.raises(ValueError, match="larger than 5, but got 4"):
            monitor.step(4)
        with pytest.raises(ValueError, match="`step` to be at least 0, but got -1"):
            monitor.step(-1)
        with pytest.raises(TypeError, match="`step` to be an integer, but got float"):
            monitor.step(7.0)  # type: ignore[arg-type]
        monitor.step(np.int64(8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="open monitor"):
        monitor.step(9)
    monitor.close()  # twice is once
    with (
        FilterMonitor(mlp(), tmp_path, resume=5) as monitor,
        pytest.raises(ValueError, match="larger than 5, but got 5"),
    ):
        monitor.step(5)


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`every` to be at least 1, but got 0"):
        FilterMonitor(mlp(), tmp_path, every=0)
    for value in (True, 2.5, "3"):
        with pytest.raises(TypeError, match="`every` to be an integer"):
            FilterMonitor(mlp(), tmp_path, every=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`resume` to be at least 0"):
        FilterMonitor(mlp(), tmp_path, resume=-1)
    with pytest.raises(TypeError, match="`model` to be a module, but got list"):
        FilterMonitor([], tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a convolution or a linear layer, but got a ReLU"):
        FilterMonitor(nn.ReLU(), tmp_path)
    with pytest.raises(ValueError, match="name a module"):
        FilterMonitor(mlp(), tmp_path, features="head")
    with pytest.raises(ValueError, match="`features` to name a convolution or a linear layer"):
        FilterMonitor(mlp(), tmp_path, features="act")
    with pytest.raises(ValueError, match="without one; run one batch"):
        FilterMonitor(nn.LazyLinear(3), tmp_path)
    assert not list(tmp_path.iterdir())  # nothing was begun


def test_a_sharded_weight_is_refused(tmp_path: Path) -> None:
    class Sharded(nn.Parameter):
        placements = ()

    model = mlp()
    model.first.weight = Sharded(model.first.weight.data)
    with pytest.raises(ValueError, match="whole weights, but got a sharded one"):
        FilterMonitor(model, tmp_path)


def test_gradients_that_were_zeroed_before_the_call_are_an_error(tmp_path: Path) -> None:
    model = mlp()
    with FilterMonitor(model, tmp_path, every=1, gradients=True) as monitor:
        monitor.step(0)
        model(torch.ones(1, 4)).sum().backward()
        model.zero_grad()
        with pytest.raises(RuntimeError, match="before zero_grad"):
            monitor.step(1)
    assert len(Recording(tmp_path)) == 1


def test_a_folder_with_a_recording_is_not_overwritten(tmp_path: Path) -> None:
    write_rows(tmp_path, [0, 1])
    before = (tmp_path / "records.bin").read_bytes()
    with pytest.raises(ValueError, match="to hold no recording"):
        FilterMonitor(mlp(), tmp_path)
    with pytest.raises(ValueError, match="other width"):
        FilterMonitor(mlp(), tmp_path, gradients=True, resume=1)
    with pytest.raises(ValueError, match="other layers"):
        FilterMonitor(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), tmp_path, resume=1)
    assert (tmp_path / "records.bin").read_bytes() == before


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="to hold a recording"):
        Recording(tmp_path / "nowhere")
    write_rows(tmp_path, [0])
    for layer, quantity in ((3, "weight"), ("act", "weight"), (1, "gradient"), (0, "weight")):
        with pytest.raises(ValueError, match=r"from 1 to 2 .* recorded quantity \(weight\)"):
            Recording(tmp_path).read(layer, quantity)
    path = tmp_path / "index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "format": 2}))
    with pytest.raises(ValueError, match="format 1 or earlier, but got 2"):
        Recording(tmp_path)
    path.write_text(json.dumps({**index, "byteorder": "big"}))
    with pytest.raises(ValueError, match="little-endian order, but got big"):
        Recording(tmp_path)
    for broken in ("{", "[]", "{}"):
        path.write_text(broken)
        with pytest.raises(ValueError, match="to be the index of a recording"):
            Recording(tmp_path)


def test_the_step_is_a_little_endian_integer_before_the_values(tmp_path: Path) -> None:
    write_rows(tmp_path, [0, 2**40])
    data = (tmp_path / "records.bin").read_bytes()
    assert struct.unpack_from("<q", data, len(data) // 2) == (2**40,)


def test_features_seen_before_a_stop_are_not_lost(tmp_path):
    def run(folder, stop):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        batches = [torch.randn(5, 4) for _ in range(8)]
        monitor = FilterMonitor(model, folder, every=4, features=True)
        monitor.step(0)
        for step, batch in enumerate(batches, start=1):
            model(batch)
            monitor.step(step)
            if step == stop:
                kept = monitor.state_dict()
                monitor.close()
                monitor = FilterMonitor(model, folder, every=4, features=True, resume=step)
                monitor.load_state_dict(kept)
        monitor.close()
        return Recording(folder).read("2", "feature")[1]

    whole = run(tmp_path / "whole", stop=None)
    assert whole[1:].isfinite().all()
    for stop in (1, 4, 6):
        assert torch.equal(run(tmp_path / str(stop), stop)[1:], whole[1:])


def test_the_state_of_another_model_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with FilterMonitor(model, tmp_path, features=True) as monitor:
        for state in ({}, {"features": torch.zeros(9)}):
            with pytest.raises(ValueError, match="to have features of shape"):
                monitor.load_state_dict(state)


class ByName(nn.Module):
    """Calls its classifier by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(input=self.body(x))


def test_a_copy_of_a_monitored_model_is_not_monitored(tmp_path):
    model = ByName()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    with FilterMonitor(model, tmp_path / "norms", every=1, features=True) as monitor:
        average = torch.optim.swa_utils.AveragedModel(model)
        model(x)
        average.train()(100 * x)  # must not be counted
        monitor.step(1)
    _, values = Recording(tmp_path / "norms").read("fc", "feature")
    wanted = model.body(x).square().mean(0).sqrt()
    torch.testing.assert_close(values[-1], wanted.detach())
