"""A training script that knows nothing of powergrad, as somebody might have written it."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler


class Blobs(Dataset):
    """Four clouds of points, too close to be told apart without an error."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (count,), generator=generator)
        centres = torch.eye(4).repeat(1, 2)
        self.points = centres[self.labels] + torch.randn(count, 8, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.body(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--decay", type=float, default=0.01)
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--save")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    spawn = {"multiprocessing_context": "spawn", "persistent_workers": True}
    spawn = spawn if args.workers else {}
    data = Blobs(96, 1)
    order = RandomSampler(data, generator=torch.Generator().manual_seed(args.seed))
    loader = DataLoader(data, 32, sampler=order, num_workers=args.workers, **spawn)
    model = Net().double()
    optimizer = getattr(torch.optim, args.optimizer)(
        model.parameters(), lr=args.lr, weight_decay=args.decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    scaler = torch.amp.GradScaler("cpu", enabled=args.amp)
    network = torch.compile(model, backend="aot_eager") if args.compile else model
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x.double()), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        schedule.step()

    test = Blobs(1000, 2)
    with torch.no_grad():
        right = (model(test.points.double()).argmax(1) == test.labels).double().mean()
    print(f"rate {schedule.get_last_lr()[0]:.6f}, accuracy {100 * right.item():.2f}")
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
