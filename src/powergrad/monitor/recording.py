r"""FilterMonitor writes the norm of every filter to disk while training; Recording reads it.

A recording is a folder of two files. ``records.bin`` has one row of fixed size per recorded step:
the step as a little-endian int64, then one float32 per unit. ``index.json`` maps the floats to
layers and quantities. Rows are only appended, each by one write, so a recording can be read at any
time; an incomplete last row, after a kill, is recognised by its size and ignored. To read it with
numpy::

    index = json.load(open("norms/index.json"))
    row = np.dtype([("step", "<i8"), ("values", "<f4", index["width"])])
    rows = np.fromfile("norms/records.bin", row)
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import struct
import sys
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from powergrad._head import find_head, unwrap
from powergrad.monitor.layers import (
    LAYERS,
    Layer,
    channel_dim,
    filter_norms,
    named_units,
    weight_of,
)
from powergrad.units import transposed_groups

__all__ = ["FilterMonitor", "Recording"]

FORMAT = 1
QUANTITIES = ("weight", "gradient", "feature", "gain")
_INDEX, _RECORDS = "index.json", "records.bin"
_STEP = struct.Struct("<q")


@dataclass(frozen=True)
class Column:
    """The position of one quantity of one layer in a row: ``values[start : start + count]``."""

    quantity: str
    layer: str
    start: int
    count: int

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.count)


class FilterMonitor:
    r"""Record the L2 norm of every filter of every convolution and linear layer during training.

    A filter is the part of a weight that computes one output channel; its norm is
    :math:`\sqrt{\sum w^2}` over its weights. Layers are numbered from 1 in registration order. Each
    record is one row of ``8 + 4 * units`` bytes in a file (23,208 for a ResNet-18 with 1,000
    classes; twice the units with `gradients`). A run of ``S`` steps writes ``S / every`` rows, and
    keeps only one row in memory.

    Under DistributedDataParallel every rank may create and call the monitor; only rank 0 writes.
    Models wrapped by it or by ``torch.compile`` record the same names as the plain model.

    Args:
        model: The network. Its layers are determined now; their weights are read at each record.
        directory: The folder to write to, created if missing. A folder that already holds a
            recording is refused unless `resume` is given.
        every: Record at steps divisible by `every`, and at the first call.
        gradients: Also record the norm of each filter's gradient, read from ``weight.grad`` when
            :meth:`step` is called: after ``backward`` and before ``zero_grad``.
        features: Also record the root mean square of each channel that enters the classifier, over
            the training examples since the last record (on rank 0). True finds the classifier; a
            string names it.
        gains: Also record the absolute gain of each channel of every normalisation.
        resume: The step from which training resumes: rows up to this step are kept, later ones are
            dropped, and new ones are appended.

    Raises:
        ValueError: If `every` is not positive, `model` has no layer, the folder holds another
            recording, or its rows do not fit `model` and the requested quantities.
        TypeError: If an argument has another type.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(3, 2)
        >>> folder = tempfile.mkdtemp()
        >>> with FilterMonitor(model, folder, every=10) as monitor:
        ...     monitor.step(0)  # the initial norms, with which the census compares
        ...     for step in range(1, 101):
        ...         monitor.step(step)  # after optimizer.step()
        >>> steps, norms = Recording(folder).read(1)
        >>> norms.shape
        torch.Size([11, 2])
    """

    def __init__(
        self,
        model: nn.Module,
        directory: str | os.PathLike[str],
        *,
        every: int = 10,
        gradients: bool = False,
        features: bool | str = False,
        gains: bool = False,
        resume: int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Expected `model` to be a module, but got {type(model).__name__}.")
        self.every = _integer(every, "every", least=1)
        self._step = -1 if resume is None else _integer(resume, "resume", least=0)
        self._closed = False
        self._hook: RemovableHandle | None = None
        parallel = distributed.is_available() and distributed.is_initialized()
        self._writes = not parallel or distributed.get_rank() == 0
        if not self._writes:
            return
        self.directory = Path(directory)
        self._gradients = gradients
        pairs = named_units(model)
        layers = {m: layer for layer, m in pairs if isinstance(m, LAYERS)}
        normalisations = {m: layer for layer, m in pairs if gains and not isinstance(m, LAYERS)}
        if not layers:
            raise ValueError(
                "Expected `model` to have a convolution or a linear layer, but got a "
                f"{type(model).__name__} with none."
            )
        self._modules, self._normalisations = list(layers), list(normalisations)
        self._head = _find_classifier(model, features)
        wanted = [("weight", layer.name, layer.units) for layer in layers.values()]
        if gradients:
            wanted += [("gradient", layer.name, layer.units) for layer in layers.values()]
        if self._head is not None:
            wanted.append(("feature", layers[self._head].name, _inputs(self._head)))
        wanted += [("gain", layer.name, layer.units) for layer in normalisations.values()]
        *starts, width = itertools.accumulate((count for *_, count in wanted), initial=0)
        columns = [
            Column(quantity, name, start, count)
            for (quantity, name, count), start in zip(wanted, starts, strict=True)
        ]
        self._columns = {q: [c for c in columns if c.quantity == q] for q in QUANTITIES}
        # One row in memory: the bytes that are written, and a float32 view to fill them.
        self._row = bytearray(_STEP.size + 4 * width)
        self._values = torch.frombuffer(self._row, dtype=torch.float32, offset=_STEP.size)
        index = {
            "format": FORMAT,
            "byteorder": sys.byteorder,
            "width": width,
            "layers": [asdict(layer) for layer in layers.values()],
            "columns": [asdict(column) for column in columns],
        }
        if normalisations:
            index["normalisations"] = [asdict(layer) for layer in normalisations.values()]
        self._file, self._rows = _open_records(self.directory, index, resume)
        if self._head is not None:
            self._sums = torch.zeros(_inputs(self._head) + 1, device="cpu")
            self._hook = _watch_inputs(self._head, self)

    def step(self, step: int) -> None:
        """Record the norms if `step` is divisible by `every`, or if this is the first record.

        Args:
            step: The number of training steps so far; larger than in the last call.

        Raises:
            ValueError: If `step` does not increase, or the monitor is closed.
            RuntimeError: If gradients are to be recorded and no layer has one.
        """
        if self._closed:
            raise ValueError("Expected an open monitor, but got a closed one.")
        if not self._writes:
            return
        step = _integer(step, "step", least=0)
        if step <= self._step:
            raise ValueError(f"Expected `step` to be larger than {self._step}, but got {step}.")
        if not self._rows or step % self.every == 0:
            self._fill(step)
            self._write()
        self._step = step

    @torch.no_grad()
    def _fill(self, step: int) -> None:
        _STEP.pack_into(self._row, 0, step)
        weights = [weight_of(module) for module in self._modules]
        groups = [transposed_groups(module) for module in self._modules]
        self._put(self._columns["weight"], filter_norms(weights, groups))
        if self._gradients:
            columns = self._columns["gradient"]
            gradients = {
                column: (weight.grad, group)
                for column, weight, group in zip(columns, weights, groups, strict=True)
                if weight.is_leaf and weight.grad is not None
            }
            # At the first record, no gradient has been computed yet.
            if self._rows and not gradients:
                raise RuntimeError(
                    f"Expected gradients at step {step}, but got none on any layer; call step() "
                    "after backward() and before zero_grad()."
                )
            self._values[columns[0].start : columns[-1].place.stop] = torch.nan
            if gradients:
                self._put(list(gradients), filter_norms(*zip(*gradients.values(), strict=True)))
        if self._head is not None:
            # Without examples since the last record this is 0 / 0 = NaN, as for any missing value.
            self._put(self._columns["feature"], [(self._sums[:-1] / self._sums[-1]).sqrt()])
            self._sums.zero_()
        if self._normalisations:
            gains = [weight_of(module).abs() for module in self._normalisations]
            self._put(self._columns["gain"], gains)

    def _put(self, columns: list[Column], values: list[Tensor]) -> None:
        """Copy the values of the columns into the row, with one transfer to the host."""
        device = values[0].device
        together = torch.cat([value.to(device, torch.float32) for value in values]).cpu()
        parts = together.split([column.count for column in columns])
        for column, part in zip(columns, parts, strict=True):
            self._values[column.place] = part

    def _add_features(self, module: nn.Module, features: Tensor) -> None:
        """Add the squares of the classifier's inputs, and their number, to the sums."""
        features = features.detach().movedim(channel_dim(module), -1).float()
        features = features.reshape(-1, features.shape[-1])
        if self._sums.device != features.device:
            self._sums = self._sums.to(features.device)
        self._sums[:-1] += features.square().sum(0)
        self._sums[-1] += len(features)

    def _write(self) -> None:
        row, done = memoryview(self._row), 0
        self._file.seek(self._rows * len(row))
        while done < len(row):
            done += self._file.write(row[done:]) or 0
        self._rows += 1

    def state_dict(self) -> dict[str, Tensor]:
        """The state to save in a checkpoint: the sums of the features since the last record."""
        return {} if self._hook is None else {"features": self._sums.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from :meth:`state_dict`, in a monitor made with `resume`.

        Raises:
            ValueError: If the features do not fit this model.
        """
        if self._hook is None:
            return
        sums = state.get("features")
        if sums is None or sums.shape != self._sums.shape:
            got = None if sums is None else tuple(sums.shape)
            raise ValueError(
                f"Expected `state` to have features of shape {tuple(self._sums.shape)}, but got "
                f"{got}."
            )
        self._sums = sums.clone()

    def close(self) -> None:
        """Sync the file to the disk, close it, and remove the hook."""
        if self._closed:
            return
        self._closed = True
        if self._hook is not None:
            self._hook.remove()
        if self._writes:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> FilterMonitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _integer(value: int, name: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"Expected `{name}` to be an integer, but got {type(value).__name__}.")
    if number < least:
        raise ValueError(f"Expected `{name}` to be at least {least}, but got {number}.")
    return number


def _inputs(layer: _ConvNd | nn.Linear) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def _find_classifier(model: nn.Module, features: bool | str) -> _ConvNd | nn.Linear | None:
    if features is False:
        return None
    try:
        head = find_head(unwrap(model), None if features is True else features)
    except ValueError as error:
        raise ValueError(str(error).replace("`head`", "`features`")) from None
    if not isinstance(head, LAYERS):
        raise ValueError(
            "Expected `features` to name a convolution or a linear layer, but got a "
            f"{type(head).__name__}."
        )
    return head


def _watch_inputs(head: nn.Module, monitor: FilterMonitor) -> RemovableHandle:
    """Pass the classifier's training inputs to the monitor; copies of the classifier do not."""
    original, watcher = weakref.ref(head), weakref.ref(monitor)

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watching = watcher()
        if watching is not None and module is original() and module.training:
            watching._add_features(module, args[0] if args else kwargs["input"])

    return head.register_forward_pre_hook(look, with_kwargs=True)


def _open_records(directory: Path, index: dict[str, Any], resume: int | None) -> tuple[FileIO, int]:
    """Open the file of rows, truncated after the step `resume`; also return the number of rows."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / _INDEX).exists():
        fresh = directory / (_INDEX + ".new")
        fresh.write_text(json.dumps(index, indent=1) + "\n")
        file = FileIO(directory / _RECORDS, "w+")
        fresh.replace(directory / _INDEX)
        return file, 0
    if resume is None:
        raise ValueError(
            f"Expected `directory` to hold no recording, but got {str(directory)!r}, which holds "
            "one; pass `resume`, the step to continue from, or another directory."
        )
    recorded = _read_index(directory)
    if recorded != index:
        part = next(key for key in index if recorded.get(key) != index[key])
        raise ValueError(
            f"Expected the recording in {str(directory)!r} to have the layers and quantities of "
            f"this monitor, but got other {part}; resume with the arguments it was started with."
        )
    file = FileIO(directory / _RECORDS, "r+")
    size = _STEP.size + 4 * index["width"]
    kept, last = 0, -1
    for number in range(os.fstat(file.fileno()).st_size // size):
        file.seek(number * size)
        (step,) = _STEP.unpack(file.read(_STEP.size))
        if not last < step <= resume:
            break
        kept, last = number + 1, step
    file.truncate(kept * size)
    return file, kept


def _read_index(directory: Path) -> dict[str, Any]:
    path = directory / _INDEX
    try:
        index = json.loads(path.read_text())
        version = int(index["format"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"Expected {str(path)!r} to be the index of a recording, but got: {error}"
        ) from None
    if version > FORMAT:
        raise ValueError(
            f"Expected a recording of format {FORMAT} or earlier, but got {version} in "
            f"{str(path)!r}; a newer version of powergrad can read it."
        )
    if index["byteorder"] != sys.byteorder:
        raise ValueError(
            f"Expected a recording in {sys.byteorder}-endian order, but got "
            f"{index['byteorder']} in {str(path)!r}."
        )
    return index


class Recording:
    """Reads the recording of a :class:`FilterMonitor`, also while it is being written.

    Every call reads the current state of the file. Iterating yields one ``(step, values)`` per row.

    Args:
        directory: The folder of the monitor, or the folder of a run with a subfolder ``norms``.

    Raises:
        ValueError: If there is no recording, or it has a newer format.

    Attributes:
        layers: The layers, in order.
        normalisations: The normalisations whose gains were recorded, in order.
        columns: The position of each quantity of each layer in a row.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        if not self.exists(directory):
            raise ValueError(
                f"Expected {str(directory)!r} to hold a recording ({_INDEX}), but got none."
            )
        path = Path(directory)
        self.directory = path if (path / _INDEX).exists() else path / "norms"
        index = _read_index(self.directory)
        self.layers = tuple(Layer(**layer) for layer in index["layers"])
        self.normalisations = tuple(Layer(**layer) for layer in index.get("normalisations", []))
        self.columns = tuple(Column(**column) for column in index["columns"])
        self._width = int(index["width"])

    @staticmethod
    def exists(directory: str | os.PathLike[str]) -> bool:
        """Whether `directory`, or its folder ``norms``, holds a recording."""
        path = Path(directory)
        return (path / _INDEX).exists() or (path / "norms" / _INDEX).exists()

    def __len__(self) -> int:
        """The number of complete rows so far."""
        return (self.directory / _RECORDS).stat().st_size // (_STEP.size + 4 * self._width)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return self._read_rows(slice(0, self._width))

    def read(self, layer: int | str, quantity: str = "weight") -> tuple[Tensor, Tensor]:
        """The steps and the values of one layer.

        Args:
            layer: The number or name of the layer; of the classifier for ``"feature"``; the name
                of the normalisation for ``"gain"``.
            quantity: ``"weight"``, ``"gradient"``, ``"feature"`` or ``"gain"``.

        Returns:
            The steps, ``(rows,)`` in int64, and the norms, ``(rows, units)`` in float32; NaN if
            there was nothing to record, such as before the first gradient.

        Raises:
            ValueError: If the recording has no such layer or quantity.
        """
        column = self.find(layer, quantity)
        rows = list(self._read_rows(column.place))
        steps = torch.tensor([step for step, _ in rows], dtype=torch.int64, device="cpu")
        none = torch.empty(0, column.count, device="cpu")
        return steps, torch.cat([none, *(values[None] for _, values in rows)])

    def find(self, layer: int | str, quantity: str = "weight") -> Column:
        """The position of `quantity` of `layer` in the rows."""
        known = (*self.layers, *self.normalisations)
        names = {entry.name for entry in known if layer in (entry.number, entry.name)}
        for column in self.columns:
            if column.layer in names and column.quantity == quantity:
                return column
        recorded = ", ".join(dict.fromkeys(column.quantity for column in self.columns))
        raise ValueError(
            f"Expected a layer from 1 to {len(self.layers)} or its name, and a recorded quantity "
            f"({recorded}), but got {layer!r} and {quantity!r}."
        )

    def _read_rows(self, place: slice) -> Iterator[tuple[int, Tensor]]:
        size, last = 4 * (place.stop - place.start), -1
        with open(self.directory / _RECORDS, "rb") as file:
            for number in range(len(self)):
                file.seek(number * (_STEP.size + 4 * self._width))
                head = file.read(_STEP.size)
                file.seek(4 * place.start, os.SEEK_CUR)
                body = bytearray(file.read(size))
                if len(body) < size:  # a resumed run has truncated the file in the meantime
                    return
                (step,) = _STEP.unpack(head)
                if step <= last:
                    raise ValueError(
                        f"Expected steps to increase in {file.name!r}, but got {step} after "
                        f"{last} in row {number}."
                    )
                last = step
                yield step, torch.frombuffer(body, dtype=torch.float32)
