r"""FilterMonitor writes the norm of every filter to disk while training; Recording reads it.

A recording is a folder of two files. ``records.npy``, which numpy reads, has one record per
recorded step: the step, then one float32 per unit. ``index.json`` maps the floats to layers and
quantities. Records are only appended. The header counts a record only after it has been written, so
the file can be read at any time, also after a kill.
"""

from __future__ import annotations

import json
import operator
import os
import re
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from itertools import accumulate
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from powergrad.checks import is_dtensor
from powergrad.head import find_head, unwrap
from powergrad.monitor.layers import (
    LAYERS,
    Column,
    gradient_of,
    measure,
    model_weights,
    weight_of,
)
from powergrad.units import local_part

FORMAT = 2
_INDEX, _RECORDS = "index.json", "records.npy"
_HEADER_SIZE, _STEP_SIZE = 192, 8


class FilterMonitor(AbstractContextManager["FilterMonitor"]):
    r"""Record the L2 norm of every filter of every convolution and linear layer during training.

    A filter is the part of a weight that computes one output channel. Layers are numbered from 1 in
    registration order. Each record takes ``8 + 4 * units`` bytes in a file.

    Under DistributedDataParallel every rank may create and call the monitor; if weights are sharded
    (FSDP2, tensor parallelism), every rank must, after sharding. Only rank 0 writes. Models wrapped
    by DistributedDataParallel or ``torch.compile`` record the same names as the plain model.

    Args:
        model: The network. Its layers are determined now; their weights are read at each record.
        directory: The folder to write to. One that holds a recording is refused without `resume`.
        every: Record at steps divisible by `every`, and at the first call.
        gradients: Also record the norm of each filter's gradient, read from ``weight.grad`` when
            :meth:`step` is called: after ``backward`` and before ``zero_grad``.
        features: Also record the root mean square of each channel that enters the classifier, over
            the training examples since the last record (on rank 0). True finds the classifier; a
            string names it.
        gains: Also record the absolute gain of each channel of every normalisation.
        resume: The step from which training resumes; later records are dropped.

    Raises:
        ValueError: If `every` is not positive, `model` has no layer, or the folder holds another
            recording, or one that does not fit `model` and the requested quantities.
        TypeError: If an argument has another type.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(3, 2)
        >>> with FilterMonitor(model, folder := tempfile.mkdtemp(), every=10) as monitor:
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
        weights = model_weights(model)
        self._together = parallel and any(is_dtensor(weight_of(module)) for _, module in weights)
        if not self._writes and not self._together:
            return
        layers = [weight for weight in weights if weight[0].quantity == "weight"]
        self._learning = [(replace(c, quantity="gradient"), m) for c, m in layers if gradients]
        self._measured = [*layers, *self._learning]
        head = None
        if features is not False:
            head = _find_classifier(model, None if features is True else features)
            entering = head.in_features if isinstance(head, nn.Linear) else head.in_channels
            (column,) = [column for column, module in layers if module is head]
            column = replace(column, quantity="feature", kind="features", units=entering)
            self._measured.append((column, head))
            self._sums = torch.zeros(entering + 1, device="cpu")
        self._measured += [weight for weight in weights if gains and weight[0].quantity == "gain"]
        starts = accumulate((column.units for column, _ in self._measured), initial=0)
        placed = zip(self._measured, starts, strict=False)
        columns = tuple(replace(column, start=start) for (column, _), start in placed)
        # The bytes of one record, and a view of its floats.
        self._record = bytearray(_STEP_SIZE + 4 * columns[-1].place.stop)
        self._values = torch.frombuffer(self._record, dtype=torch.float32, offset=_STEP_SIZE)
        self.directory = Path(directory)
        opened: list[Any] = [None]
        try:
            if self._writes:
                opened[0] = _open(self.directory, columns, resume)
                self._file = open(self.directory / _RECORDS, "r+b")  # noqa: SIM115
        except (OSError, ValueError) as error:
            opened[0] = error
        if self._together:  # all of them know of the error, and whether there are records
            distributed.broadcast_object_list(opened)
        if isinstance(opened[0], Exception):
            raise opened[0]
        self._records: int = opened[0]
        if head is not None and self._writes:

            def look(module: nn.Module, args: Any, kwargs: Any) -> None:
                if module is head and module.training:  # not a copy of it
                    self._add_features(module, args[0] if args else kwargs["input"])

            self._hook = head.register_forward_pre_hook(look, with_kwargs=True)

    def step(self, step: int) -> None:
        """Record the norms if `step` is divisible by `every`, or if this is the first record.

        Args:
            step: The number of training steps so far; larger than in the last call.

        Raises:
            ValueError: If `step` does not increase, or the monitor is closed.
            RuntimeError: If gradients are to be recorded and no layer has one.
        """
        if self._closed:
            raise ValueError("This FilterMonitor is closed.")
        if not self._writes and not self._together:
            return
        step = _integer(step, "step", least=self._step + 1)
        if not self._records or step % self.every == 0:
            # At the first record, no gradient has been computed yet.
            missing = [gradient_of(module) is None for _, module in self._learning if self._records]
            if missing and all(missing):
                raise RuntimeError(
                    f"Expected gradients at step {step}, but got none on any layer; call step() "
                    "after backward() and before zero_grad()."
                )
            with torch.no_grad():
                measured = [weight for weight in self._measured if weight[0].quantity != "feature"]
                norms = iter(measure(measured))
                values = [
                    self._mean_features() if column.quantity == "feature" else next(norms)
                    for column, _ in self._measured
                ]
            if self._writes:
                self._write_record(step, values)
            self._records += 1
        self._step = step

    def _write_record(self, step: int, values: list[Tensor]) -> None:
        device = values[0].device
        self._record[:_STEP_SIZE] = step.to_bytes(_STEP_SIZE, sys.byteorder)
        self._values.copy_(torch.cat([x.to(device, torch.float32) for x in values]))
        self._write(_HEADER_SIZE + self._records * len(self._record), self._record)
        self._write(0, _header(self._records + 1, len(self._values)))

    def _mean_features(self) -> Tensor:
        # Without examples since the last record this is 0 / 0 = NaN, as for any missing value.
        values = (self._sums[:-1] / self._sums[-1]).sqrt()
        self._sums.zero_()
        return values

    def _add_features(self, module: Any, features: Tensor) -> None:
        """Add the squares of the classifier's inputs, and their number, to the sums."""
        channel = -1 if isinstance(module, nn.Linear) else -1 - len(module.kernel_size)
        features = local_part(features).detach().movedim(channel, -1).float()
        features = features.reshape(-1, features.shape[-1])
        self._sums = self._sums.to(features.device)
        self._sums[:-1] += features.square().sum(0)
        self._sums[-1] += len(features)

    def _write(self, place: int, data: bytes | bytearray) -> None:
        self._file.seek(place)
        self._file.write(data)
        self._file.flush()

    def state_dict(self) -> dict[str, Tensor]:
        """The state to save in a checkpoint: the sums of the features since the last record."""
        return {} if self._hook is None else {"features": self._sums.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from :meth:`state_dict`, in a monitor made with `resume`."""
        if self._hook is not None:
            self._sums = self._sums.copy_(state["features"])

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

    def __exit__(self, *exception: object) -> None:
        self.close()


def _integer(value: int, name: str, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"Expected `{name}` to be an integer, but got {type(value).__name__}.")
    if (number := operator.index(value)) < least:
        raise ValueError(f"Expected `{name}` to be at least {least}, but got {number}.")
    return number


def _find_classifier(model: nn.Module, name: str | None) -> Any:
    try:
        head = find_head(unwrap(model), name)
    except ValueError as error:
        raise ValueError(str(error).replace("`head`", "`features`")) from None
    if not isinstance(head, LAYERS):
        got = type(head).__name__
        raise ValueError(f"Expected `features` to name a layer with filters, but got a {got}.")
    return head


# The files ----------------------------------------------------------------------------------------


def _header(records: int, width: int) -> bytes:
    """The header of the .npy file: of the same size for any number of records."""
    order = "<" if sys.byteorder == "little" else ">"
    dtype = f"[('step', '{order}i8'), ('values', '{order}f4', ({width},))]"
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': ({records:>16},), }}"
    start = b"\x93NUMPY\x01\x00" + (_HEADER_SIZE - 10).to_bytes(2, "little")
    return start + text.encode().ljust(_HEADER_SIZE - 11) + b"\n"


def _open(directory: Path, columns: tuple[Column, ...], resume: int | None) -> int:
    """Begin a recording, or drop the records after the step `resume`; the number of records."""
    directory.mkdir(parents=True, exist_ok=True)
    path, width, kept = directory / _RECORDS, columns[-1].place.stop, 0
    if not (directory / _INDEX).exists():
        path.write_bytes(_header(0, width))
        index = {"format": FORMAT, "columns": [asdict(column) for column in columns]}
        fresh = directory / (_INDEX + ".new")
        fresh.write_text(json.dumps(index, indent=1) + "\n")
        fresh.replace(directory / _INDEX)
    elif resume is None:
        raise ValueError(
            f"Expected `directory` to hold no recording, but got {str(directory)!r}, which holds "
            "one; pass `resume`, the step to continue from, or another directory."
        )
    elif (recording := Recording(directory)).columns != columns:
        raise ValueError(
            f"Expected the recording in {str(directory)!r} to have the layers and quantities of "
            "this monitor, but got others; resume with the arguments it was started with."
        )
    else:
        kept = int((recording.load()[0] <= resume).sum())
        with open(path, "r+b") as file:  # which is never cut, since readers map it into memory
            file.write(_header(kept, width))
    return kept


class Recording:
    """Reads the recording of a :class:`FilterMonitor`, also while it is being written.

    Every call reads the current state of the file. `columns` are the layers and their quantities,
    with their positions in a record.

    Args:
        directory: The folder of the monitor, or the folder of a run with a subfolder ``norms``.

    Raises:
        ValueError: If there is no recording, or it has another format.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        if not self.exists(directory):
            name = str(directory)
            raise ValueError(f"Expected {name!r} to hold a recording ({_INDEX}), but got none.")
        path = Path(directory)
        self.directory = path if (path / _INDEX).exists() else path / "norms"
        index = json.loads((self.directory / _INDEX).read_text())
        version = index.get("format") if isinstance(index, dict) else None
        if version != FORMAT:
            raise ValueError(
                f"Expected the recording in {str(directory)!r} to be of format {FORMAT}, but got "
                f"{version}; the version of powergrad that wrote it can read it."
            )
        self.columns = tuple(Column(**column) for column in index["columns"])

    @staticmethod
    def exists(directory: str | os.PathLike[str]) -> bool:
        """Whether `directory`, or its folder ``norms``, holds a recording."""
        return any((Path(directory) / inside / _INDEX).exists() for inside in ("", "norms"))

    def read(self, layer: int | str, quantity: str = "weight") -> tuple[Tensor, Tensor]:
        """The steps and the values of one layer.

        Args:
            layer: The number or name of the layer; of the classifier for ``"feature"``; the name
                of the normalisation for ``"gain"``.
            quantity: ``"weight"``, ``"gradient"``, ``"feature"`` or ``"gain"``.

        Returns:
            The steps, ``(records,)`` in int64, and the norms, ``(records, units)`` in float32; NaN
            if there was nothing to record, such as before the first gradient.

        Raises:
            ValueError: If the recording has no such layer or quantity.
        """
        for column in self.columns:
            if column.quantity == quantity and layer in (column.number, column.layer):
                steps, values = self.load()
                return steps, values[:, column.place].clone()
        recorded = ", ".join(dict.fromkeys(column.quantity for column in self.columns))
        raise ValueError(
            "Expected the number or the name of a layer, and a quantity recorded for it (of "
            f"{recorded}), but got {layer!r} and {quantity!r}."
        )

    def load(self) -> tuple[Tensor, Tensor]:
        """All steps ``(records,)`` and values ``(records, values)``, mapped into memory."""
        path, width = self.directory / _RECORDS, self.columns[-1].place.stop
        with open(path, "rb") as file:  # a private copy, since torch takes no read-only memory
            mapped = mmap(file.fileno(), 0, access=ACCESS_COPY)
        words = len(mapped) // 4
        data = torch.frombuffer(mapped, dtype=torch.int32, count=words)
        start, row = _HEADER_SIZE // 4, _STEP_SIZE // 4 + width
        header = bytes(data[:start].view(torch.uint8).tolist())
        found = re.search(rb"\( *(\d+),\), }", header)
        if not found or header != _header(int(found[1]), width):
            raise ValueError(f"Expected {str(path)!r} to fit its {_INDEX}, but it does not.")
        count = min(int(found[1]), (words - start) // row)
        table = data[start : start + count * row].view(count, row)
        steps = table[:, :2].flatten().view(torch.int64)
        rising = steps.diff(prepend=steps.new_tensor([-1])) > 0  # zeros follow after a power cut
        count = int(rising.cumprod(0).sum())
        return steps[:count], table[:count, 2:].view(torch.float32)
