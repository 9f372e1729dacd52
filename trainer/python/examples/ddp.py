"""Trains a small classifier on noisy two-dimensional points, on any number of workers that may change at any step.

Start it as capstan-agent --in-place -- python ddp.py [TOTAL [CHECKPOINT]].
"""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import capstan

BATCH = 96  # of the whole job, in each step, whatever the number of workers


def batch(index, rank, world):
    """This worker's share of a step's samples: which samples a step has depends on nothing but its number."""
    g = torch.Generator().manual_seed(index)
    x = torch.randn(BATCH, 2, generator=g)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return x[rank::world], y[rank::world]


total = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
checkpoint = sys.argv[2] if len(sys.argv) > 2 else None
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
parallel = None


def entered():
    global parallel
    parallel = DistributedDataParallel(model)


for step in capstan.steps({"model": model, "optimizer": optimizer}, total, checkpoint, entered, backend="gloo"):
    with step:
        x, y = batch(step.index, step.rank, step.world)
        # The mean over the whole batch: DistributedDataParallel takes the mean over workers, whose shares may differ by one sample.
        loss = torch.nn.functional.cross_entropy(parallel(x), y, reduction="sum") * step.world / BATCH
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step.rank == 0 and (step.index + 1) % 500 == 0:
        x, y = batch(-1, 0, 1)
        accuracy = (model(x).argmax(1) == y).float().mean()
        print(f"step {step.index + 1}: {step.world} workers, accuracy {accuracy:.3f}", flush=True)
