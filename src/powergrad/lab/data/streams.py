"""Stateless random numbers: each number is a function of its purpose.

A counter-based hash (the finaliser of splitmix64, chained over its arguments) replaces a generator:
the numbers of example 17 in epoch 3 depend only on the seed, 3 and 17, not on earlier draws. So a
run can start anywhere, and any number of processes agree, on every machine. See Steele, Lea, Flood,
*Fast splittable pseudorandom number generators*, OOPSLA 2014.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Stream(IntEnum):
    """The purpose of random numbers; the streams of one seed are independent."""

    ORDER = 1
    AUGMENT = 2
    SPLIT = 4  # 3 was that of an earlier version


def hashed(stream: Stream, *parts: int | NDArray[np.int64]) -> NDArray[np.uint64]:
    """A hash of the stream and `parts`, which broadcast; the result is at least 1-d."""
    state = np.full(1, stream, np.uint64)
    for part in parts:
        state = state ^ np.asarray(part).astype(np.uint64)
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def uniform(stream: Stream, *parts: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), from the upper 53 bits of the hash."""
    return (hashed(stream, *parts) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch: indices sorted by their hashes."""
    return np.argsort(hashed(Stream.ORDER, seed, epoch, np.arange(count)), kind="stable")


def held_out(labels: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    """Which examples are held out: a fixed `fraction` of each class, independent of the seed."""
    ranks, _ = _ranks_in_class(labels)
    return ranks < np.rint(fraction * np.bincount(labels))[labels]


def held_out_groups(
    labels: NDArray[np.int64], groups: NDArray[np.int64], fraction: float
) -> NDArray[np.bool_]:
    """Which examples are held out in whole groups: about a fixed `fraction` of each class.

    Groups are visited in a fixed random order and change sides if that reduces the imbalance
    ``sum_k (held_k - fraction n_k)^2 / n_k`` over the classes `k`, until no change reduces it.
    """
    sizes = np.bincount(labels).astype(np.float64)
    target = fraction * sizes
    count = groups.max(initial=-1) + 1
    pairs, numbers = np.unique(groups * len(sizes) + labels, return_counts=True)
    members, classes = np.divmod(pairs, len(sizes))  # one row per class of a group
    starts = np.searchsorted(members, np.arange(count + 1))
    order = np.argsort(hashed(Stream.SPLIT, np.arange(count)), kind="stable")
    excess, is_held = -target, np.zeros(count, np.bool_)
    changed = True
    while changed:
        changed = False
        for group in order.tolist():
            rows = slice(starts[group], starts[group + 1])
            touched, change = classes[rows], numbers[rows] * (-1.0 if is_held[group] else 1.0)
            # ((e + c)^2 - e^2) / n; the tolerance prevents cycles from rounding errors
            if (change * (2 * excess[touched] + change) / sizes[touched]).sum() < -1e-9:
                excess[touched] += change
                is_held[group] = not is_held[group]
                changed = True
    return is_held[groups]


def balanced_subset(labels: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """`count` indices, sorted, from a fixed shuffle that takes the classes in turn."""
    ranks, keys = _ranks_in_class(labels)
    return np.sort(np.lexsort((keys, ranks))[:count])


def _ranks_in_class(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """The position of each example within its class in a fixed shuffle, and the sort keys."""
    keys = hashed(Stream.SPLIT, np.arange(len(labels)))
    order = np.lexsort((keys, labels))  # by class, then by key
    counts = np.bincount(labels)
    ranks = np.empty(len(labels), np.int64)
    ranks[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks, keys
