"""Measure the paper's listing against the equation that it stands for.

    python benchmarks/audit.py    measure; write results/audit.csv (a few minutes)
    make pages                    redraw the tables of results/audit.md from that file

The listing is a backward hook on the logits. The loss that it meets is mean-reduced cross-entropy
over `N` examples times a loss scale `S`, so the gradient that it receives is ``S/N * (p - q)``, and
the one that it should return is ``S/N * (p' - q)``.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powergrad.lab.trainer.objectives import as_published_cross_entropy, published_hook

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "audit.csv"

Row = dict[str, str]
CONDITIONS = ["experiment", "torch", "dtype", "N", "C", "S", "alpha", "seed", "setting"]
FIELDS: list[str] = [*CONDITIONS, "metric", "value"]


# The two gradients -------------------------------------------------------------------------------


# With r = S / N^2, s = 1 - p_y and T the sum of p_k^alpha over the wrong classes (T >= s^alpha),
# the listing's gradient of a row is the equation's times f(r) / (r f(1)), where
# f(r) = r^alpha T / ((1 - rs)^alpha + r^alpha T). It is between 1 and 1/r for r <= 1/2, and between
# 1/r and 1 for r >= 2 if it is not NaN:
#
# f grows, so f(r) <= f(1) for r < 1 and >= for r > 1: these are the bounds 1/r. With x = rs, the
# derivative of f(r)/r has the sign of x - (1 - alpha) - x^alpha (1 - x)^(1-alpha) T/s^alpha. That
# is convex in x and negative at 0, so f(r)/r falls and then perhaps rises; and it is negative for
# x <= 1/2, where x^alpha (1 - x)^(1-alpha) >= x.
#
# r <= 1/2: there f(r)/r >= 2 f(1/2), and 2 f(1/2) >= f(1) amounts to 2 (1 - s)^alpha + T >=
# (2 - s)^alpha, true because T >= s^alpha and powers under 1 are subadditive.
#
# r >= 2 and not NaN: s < 1/2, and f(r)/r is at most the larger of its values at the ends r = 1 and
# r = 1/s, which are f(1) and s; and s <= s^alpha / ((1 - s)^alpha + s^alpha) <= f(1) for s <= 1/2.


def listing(logits: Tensor, target: Tensor, alpha: float, scale: float) -> Tensor:
    """The gradient at the logits with the hook in place, in the dtype of the logits.

    Logits of 16 bits are widened before the loss, as autocast does it on CUDA (on CPU it does not),
    so the gradient is formed in float32 and rounded to 16 bits just before the hook sees it.
    """
    logits = logits.detach().clone().requires_grad_()
    loss = as_published_cross_entropy(logits, target, alpha=alpha)
    (grad,) = torch.autograd.grad(loss * scale, logits)
    return grad


def equation(logits: Tensor, target: Tensor, alpha: float, scale: float) -> Tensor:
    """``S/N * (p' - q)`` in float64."""
    logits = logits.double()
    labels = F.one_hot(target, logits.shape[-1])
    return scale / len(logits) * ((alpha * logits).softmax(-1) - labels)


def widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def batch(n: int, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Normal logits of deviation 2, the true one raised so that p_y is near 1/2 in the middle."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(num_classes, (n,), generator=generator)
    logits = 2 * torch.randn(n, num_classes, generator=generator, dtype=torch.float64)
    # The log-sum-exp of C such logits is about log C + 2^2 / 2.
    return logits + (math.log(num_classes) + 2) * F.one_hot(target, num_classes), target


def compare(got: Tensor, want: Tensor) -> dict[str, float]:
    """Size, direction and worst row of `got` against `want`, over the rows that are finite."""
    finite = got.isfinite().all(-1)
    got, want = got.double()[finite], want[finite]
    worst = (got - want).abs().amax(-1) / want.abs().amax(-1)
    return {
        "nan_rows": 1 - finite.double().mean().item(),
        "size": (got.norm() / want.norm()).item(),
        "cosine": F.cosine_similarity(got.flatten(), want.flatten(), dim=0).item(),
        "worst_row": worst.max().item(),
    }


# One gradient ------------------------------------------------------------------------------------


def measure_scale() -> Iterator[Row]:
    """Batch sizes and loss scales in float32; then the other dtypes at one batch size."""
    cases = [
        (torch.float32, n, c, scale)
        for c in (10, 100, 1000)
        for n in (32, 64, 100, 128, 256)
        for scale in sorted({1, n * n / 4, n * n / 2, n * n, 2 * n * n, 65536})
    ]
    cases += [
        (dtype, 256, 1000, scale)
        for dtype in (torch.float64, torch.bfloat16, torch.float16)
        for scale in (1, 256**2)
    ]
    for dtype, n, c, scale in cases:
        logits, target = batch(n, c, seed=0)
        logits = logits.to(dtype)
        found = compare(listing(logits, target, 0.3, scale), equation(logits, target, 0.3, scale))
        yield from rows("scale", found, dtype=dtype, N=n, C=c, S=scale, alpha=0.3, seed=0)


def measure_powers() -> Iterator[Row]:
    """Which wrong-class probabilities come back bit for bit at S = N^2, and what a scaler reaches.

    A scaler that starts at a power of two and only doubles and halves stays at powers of two.
    """
    for n in (32, 48, 64, 100, 128, 200, 256):
        logits, target = batch(n, 1000, seed=0)
        logits = logits.float()
        wrong = F.one_hot(target, 1000) == 0
        p = plain(logits, target, "sum", 1)[wrong]
        recovered = plain(logits, target, "mean", n**2)[wrong] / n
        below = 2.0 ** math.floor(math.log2(n**2))
        there = compare(listing(logits, target, 0.3, below), equation(logits, target, 0.3, below))
        found = {
            "bit_for_bit": (recovered == p).double().mean().item(),
            "worst_relative": (recovered.double() / p - 1).abs().max().item(),
            "power_of_two_below": below,
            "size_there": there["size"],
        }
        where = {"dtype": torch.float32, "N": n, "C": 1000, "S": n**2, "alpha": 0.3, "seed": 0}
        yield from rows("powers", found, **where)


def plain(logits: Tensor, target: Tensor, reduction: str, scale: float) -> Tensor:
    """The gradient of ordinary cross-entropy at the logits."""
    logits = logits.detach().clone().requires_grad_()
    loss = F.cross_entropy(logits, target, reduction=reduction) * scale
    (grad,) = torch.autograd.grad(loss, logits)
    return grad


def largest_vanishing(dtype: torch.dtype, n: int, true_class: bool, r: float = 1) -> float:
    """The largest probability that the hook takes for 0 at S = r N^2, by bisection."""
    labels = torch.tensor([[1, 0]]).expand(n, -1)

    def vanishes(p: float) -> bool:
        wrong = 1 - p if true_class else p
        grad = r * n * torch.tensor([-wrong, wrong], dtype=torch.float64)
        arriving = grad.float().to(dtype).expand(n, -1)
        p_flat = published_hook(arriving, labels, 0.3)[0] / n + labels[0]
        return bool(p_flat[0 if true_class else 1] == 0)

    low, high = 2.0**-160, 0.5
    while high / low > 1 + 2.0**-20:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if vanishes(middle) else (low, middle)
    return low


def measure_flush() -> Iterator[Row]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n in (32, 256):
            found = {
                "wrong_class": largest_vanishing(dtype, n, true_class=False),
                "true_class": largest_vanishing(dtype, n, true_class=True),
            }
            yield from rows("flush", found, dtype=dtype, N=n, C=2, S=n**2, alpha=0.3)


def push_at_gap(alpha: float, gap: float, n: int, num_classes: int) -> dict[str, float]:
    """``1 - p'_y`` when every wrong logit lies `gap` below the true one, at S = N^2.

    The gradient reaches the listing rounded to float16; the logits themselves are not rounded.
    """
    logits = torch.full((n, num_classes), -gap, dtype=torch.float64)
    logits[:, 0] = 0
    target = torch.zeros(n, dtype=torch.long)
    labels = F.one_hot(target, num_classes)
    arriving = plain(logits, target, "mean", n**2).float().half()
    return {
        "equation": equation(logits, target, alpha, n**2)[0, 0].abs().item() / n,
        "listing": published_hook(arriving, labels, alpha)[0, 0].abs().item() / n,
    }


def measure_push() -> Iterator[Row]:
    for alpha in (0.05, 0.25, 0.3, 0.92):
        for gap in (17.2, 17.4):
            found = push_at_gap(alpha, gap, 256, 1000)
            where = {"dtype": torch.float16, "N": 256, "C": 1000, "S": 256**2, "alpha": alpha}
            yield from rows("push", found, **where, setting=f"gap={gap}")


# A short training --------------------------------------------------------------------------------


@dataclass
class Training:
    """What a short training left: the scale before each step, and how the network ended."""

    scales: list[float]
    skipped: int
    hard_steps: float
    accuracy: float
    loss: float
    gap: float


def train(
    method: str,
    *,
    n: int,
    seed: int,
    steps: int,
    alpha: float = 0.3,
    dtype: torch.dtype = torch.float16,
    init_scale: float = 65536.0,
    growth_interval: int = 50,
    optimizer: str = "sgd",
    lr: float = 0.05,
    distance: float = 1.0,
) -> Training:
    """Train a perceptron on ten Gaussian clusters with the "listing" or the "equation".

    Only float16 has a loss scaler, as is usual. `distance` is the deviation of the clusters'
    centres in 16 dimensions, in units of the clusters' own: at 1 they overlap, at 4 they do not.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    centres = distance * torch.randn(10, 16, generator=generator)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(10, (count,), generator=generator)
        return centres[y] + torch.randn(count, 16, generator=generator), y

    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=lr),
    }
    step = optimizers[optimizer](net.parameters())
    half = dtype == torch.float16
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=init_scale, growth_interval=growth_interval, enabled=half
    )
    scales, skipped, hard = [], 0, 0
    for _ in range(steps):
        x, y = draw(n)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = net(x)
        if method == "listing":
            loss = as_published_cross_entropy(logits, y, alpha=alpha)
        else:  # the potential whose gradient is the equation
            loss = F.cross_entropy(alpha * widened(logits), y) / alpha
        p_true = widened(logits.detach()).softmax(-1).gather(1, y[:, None])
        hard += int(p_true.min() < 0.5)
        scales.append(scaler.get_scale())
        step.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(step)
        scaler.update()
        skipped += scaler.get_scale() < scales[-1]

    x, y = draw(4096)
    with torch.no_grad():
        logits = net(x)
    gaps = (logits.gather(1, y[:, None]) - logits)[F.one_hot(y, 10) == 0]
    return Training(
        scales=scales,
        skipped=skipped,
        hard_steps=hard / steps,
        accuracy=(logits.argmax(1) == y).double().mean().item(),
        loss=F.cross_entropy(logits, y).item(),
        gap=gaps.median().item(),
    )


def measure_settle() -> Iterator[Row]:
    """Where a real GradScaler takes the scale when the network is trained with the listing."""
    for distance, sizes in ((1.0, (32, 48, 64, 100, 128, 256)), (4.0, (32, 64, 128))):
        for n in sizes:
            for seed in range(3):
                run = train("listing", n=n, seed=seed, steps=600, distance=distance)
                found = {
                    "at_n_squared": run.scales.count(n**2) / len(run.scales),
                    "most_common": Counter(run.scales).most_common(1)[0][0],
                    "last": run.scales[-1],
                    "skipped": run.skipped / len(run.scales),
                    "hard_steps": run.hard_steps,
                }
                setting = f"distance={distance:g} steps=600 growth_interval=50 sgd lr=0.05"
                where = {"dtype": torch.float16, "N": n, "C": 10, "S": "scaler", "alpha": 0.3}
                yield from rows("settle", found, **where, seed=seed, setting=setting)


def measure_no_scaler() -> Iterator[Row]:
    for dtype in (torch.float32, torch.bfloat16):
        for optimizer, lr in (("sgd", 0.05), ("sgd", 0.01), ("adam", 0.003)):
            for method in ("listing", "equation"):
                for seed in range(3):
                    run = train(
                        method, n=64, seed=seed, steps=300, dtype=dtype, optimizer=optimizer, lr=lr
                    )
                    found = {"accuracy": run.accuracy, "loss": run.loss}
                    setting = f"{method} {optimizer} lr={lr:g} steps=300"
                    where = {"dtype": dtype, "N": 64, "C": 10, "S": 1, "alpha": 0.3}
                    yield from rows("no_scaler", found, **where, seed=seed, setting=setting)


def measure_gap() -> Iterator[Row]:
    """The listing at its best, S = N^2 throughout: how far do the logits get?"""
    for alpha in (0.05, 0.25, 0.3, 0.92):
        for method in ("listing", "equation"):
            for seed in range(3):
                run = train(
                    method,
                    n=64,
                    seed=seed,
                    steps=2000,
                    alpha=alpha,
                    init_scale=64.0**2,
                    growth_interval=10**6,
                    lr=0.01,
                )
                found = {"gap": run.gap, "accuracy": run.accuracy, "loss": run.loss}
                setting = f"{method} sgd lr=0.01 steps=2000"
                where = {"dtype": torch.float16, "N": 64, "C": 10, "S": 64**2, "alpha": alpha}
                yield from rows("gap", found, **where, seed=seed, setting=setting)


# The file ----------------------------------------------------------------------------------------


def rows(experiment: str, found: dict[str, float], **conditions: object) -> Iterator[Row]:
    where = {"experiment": experiment, "torch": torch.__version__, **conditions}
    for metric, value in found.items():
        row = {key: text(where.get(key, "")) for key in CONDITIONS}
        yield row | {"metric": metric, "value": f"{value:.9g}"}


def text(condition: object) -> str:
    """A condition as the file has it: 4096 for 4096.0, float16 for torch.float16."""
    number = isinstance(condition, (int, float))
    return f"{condition:g}" if number else str(condition).removeprefix("torch.")


MEASUREMENTS = (
    measure_scale,
    measure_powers,
    measure_flush,
    measure_push,
    measure_settle,
    measure_no_scaler,
    measure_gap,
)


def read_results() -> list[Row]:
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def write_results(results: Iterable[Row]) -> None:
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(results)


# The tables --------------------------------------------------------------------------------------


class Results:
    """The rows of results/audit.csv, looked up by their conditions."""

    def __init__(self, results: list[Row]) -> None:
        self.rows = results

    def values(self, metric: str, **conditions: object) -> list[float]:
        """Every value of `metric` under `conditions`, one a seed."""
        wanted = {"metric": metric} | {key: text(value) for key, value in conditions.items()}
        return [
            float(row["value"])
            for row in self.rows
            if all(row[key] == value for key, value in wanted.items())
        ]

    def value(self, metric: str, **conditions: object) -> float:
        """The only value of `metric` under `conditions`."""
        (value,) = self.values(metric, **conditions)
        return value

    def range(self, metric: str, form: str, **conditions: object) -> str:
        """The lowest and the highest over the seeds, once if they print alike."""
        values = self.values(metric, **conditions)
        if any(map(math.isnan, values)):
            return f"NaN in {sum(map(math.isnan, values))} of {len(values)} runs"
        ends = [format(end, form) for end in (min(values), max(values))]
        return " to ".join(dict.fromkeys(ends))


def table(header: str, lines: Iterable[Iterable[object]]) -> str:
    rows = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return "\n".join([f"| {header} |", "|---" * len(header.split(" | ")) + "|", *rows])


def size_text(results: Results, **conditions: object) -> str:
    nan = results.value("nan_rows", **conditions)
    size = results.value("size", **conditions)
    form = ",.0f" if size >= 100 else ".2f" if size >= 0.1 else ".3f"
    return f"NaN in {nan:.0%} of rows, else {size:{form}}" if nan else f"{size:{form}}"


def scale_table(results: Results) -> str:
    def line(n: int) -> Iterator[str]:
        yield str(n)
        for scale in (1, n * n / 2, n * n, 2 * n * n, 65536):
            where = {"experiment": "scale", "dtype": "float32", "C": 1000, "N": n}
            yield size_text(results, **where, S=scale)

    header = "N | S = 1 (no scaler) | N²/2 | N² | 2N² | 65536 (a scaler's start)"
    return table(header, map(line, (32, 64, 100, 256)))


def settle_table(results: Results) -> str:
    def line(case: tuple[str, int, int]) -> Iterator[str]:
        clusters, distance, n = case
        setting = f"distance={distance} steps=600 growth_interval=50 sgd lr=0.05"
        where = {"experiment": "settle", "N": n, "setting": setting}
        yield from (clusters, str(n), f"{n**2:,}")
        yield results.range("at_n_squared", ".1%", **where)
        yield results.range("last", ",.0f", **where)
        yield results.range("skipped", ".1%", **where)

    header = "clusters | N | N² | steps at N² | last scale | steps lost to NaN"
    cases = [("overlap", 1, n) for n in (32, 64, 100, 256)]
    return table(header, map(line, [*cases, ("apart", 4, 64)]))


def gap_table(results: Results) -> str:
    def line(alpha: float) -> Iterator[str]:
        yield str(alpha)
        for metric, form in (("gap", ".1f"), ("loss", ".3f")):
            for method in ("listing", "equation"):
                setting = f"{method} sgd lr=0.01 steps=2000"
                yield results.range(metric, form, experiment="gap", alpha=alpha, setting=setting)

    header = "alpha | gap: listing | gap: equation | loss: listing | loss: equation"
    return table(header, map(line, (0.05, 0.25, 0.3, 0.92)))


TABLES: dict[str, Callable[[Results], str]] = {
    "scale": scale_table,
    "settle": settle_table,
    "gap": gap_table,
}


def main() -> None:
    torch.set_num_threads(1)
    write_results(row for measure in MEASUREMENTS for row in measure())


if __name__ == "__main__":
    main()
