"""Dead units planted in real networks: every one found, no living one accused.

    python benchmarks/planted.py [--seeds 3]     writes results/bench_planted.csv

In each network a share of the filters is made zero or tiny, some gains are made zero, and one whole
layer is. The census then looks at the model, at its state dict, at the model with its start known,
and at a recording in which all of them die, live again, and die once more. A row counts what was
planted, how much of it was found, and what was named without having been planted.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch
from torch import nn

from powergrad.monitor import Census, FilterMonitor, census

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet18": ("resnet18", {}),
    "resnet18 without normalisation": (
        "resnet18",
        {"norm_layer": lambda channels, **_: nn.Identity()},
    ),
    "resnet50": ("resnet50", {}),
    "vgg11_bn": ("vgg11_bn", {}),
    "mobilenetv2_100": ("mobilenetv2_100", {}),
    "regnetx_002": ("regnetx_002", {}),
    "densenet121": ("densenet121", {}),
    "convnext_atto": ("convnext_atto", {}),
    "vit_tiny_patch16_224": ("vit_tiny_patch16_224", {}),
}

Units = set[tuple[str, int]]


def create(name: str) -> nn.Module:
    """The network, with every gain away from the zero that some are initialised to."""
    kind, options = NETWORKS[name]
    model = harness.create_timm(kind, num_classes=100, **options)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
            nn.init.uniform_(module.weight, 0.1, 1.0)
    return model


def plant(model: nn.Module, chance: random.Random) -> tuple[Units, Units]:
    """Make units vanish; returns the filters and the gains."""
    filters: Units = set()
    gains: Units = set()
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear))
    ]
    whole = chance.choice(layers)[0]
    with torch.no_grad():
        for name, module in layers:
            for unit in range(len(module.weight)):
                if name == whole or chance.random() < 0.05:
                    module.weight[unit] *= 0.0 if name == whole else chance.choice([0.0, 1e-5])
                    filters.add((name, unit))
        for name, module in model.named_modules():
            if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
                for unit in range(len(module.weight)):
                    if chance.random() < 0.05:
                        module.weight[unit] = 0.0
                        gains.add((name, unit))
    return filters, gains


def record(start: nn.Module, dead: nn.Module) -> Census:
    """The census of a run in which what is dead in `dead` dies, revives and dies again."""
    model = copy.deepcopy(start)
    states = [start.state_dict(), dead.state_dict()] * 2
    with tempfile.TemporaryDirectory() as folder:
        with FilterMonitor(model, folder, every=1) as monitor:
            for step, state in enumerate(states):
                model.load_state_dict(state)
                monitor.step(step)
        return census(folder)


def measure(name: str, seed: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(seed)
    start = create(name)
    model = copy.deepcopy(start)
    filters, gains = plant(model, random.Random(seed))
    sources: dict[str, tuple[Callable[[], Census], Units]] = {
        "living model": (lambda: census(start), set()),
        "model": (lambda: census(model), filters | gains),
        "state dict": (lambda: census(model.state_dict()), filters | gains),
        "model and its start": (lambda: census(model, initial=start), filters | gains),
        "recording": (lambda: record(start, model), filters),
    }
    for source, (run, planted) in sources.items():
        found = run()
        named = {(unit.layer, unit.unit) for unit in found.units}
        lives = {"died": 2 * len(planted), "revived": len(planted)} if found.steps else {}
        yield {
            "network": name,
            "seed": seed,
            "source": source,
            "units": sum(layer.units for layer in found.layers),
            "planted": len(planted),
            "found": len(named & planted),
            "missed": len(planted - named),
            "accused": len(named - planted),
            "whole_layers": " ".join(found.whole_layers),
            "events_planted": sum(lives.values()),
            "events_found": sum(event.what in lives for event in found.events),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    rows = [row for name in NETWORKS for seed in range(given.seeds) for row in measure(name, seed)]
    harness.save("planted", rows)
    for row in rows:
        print(*(f"{key}={row[key]}" for key in row if key != "seed"))
    wrong = [
        r for r in rows if r["missed"] or r["accused"] or r["events_planted"] != r["events_found"]
    ]
    print(
        f"{sum(r['planted'] for r in rows):,} planted, {sum(r['missed'] for r in rows):,} missed, "
        f"{sum(r['accused'] for r in rows):,} accused; {len(wrong)} of {len(rows)} rows are wrong."
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
