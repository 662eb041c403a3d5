"""The memory that a step allocates, from the profiler's record of every allocation: how much there is at its peak, and of which kind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmworks.profile.spans import FORWARD, PREFIX, WHOLE

_HEAD = ("_ChunkedHead",)  # autograd functions of the loss, and their backward nodes
# around casts whose size does not tell: the first of the loss, and the one after the embedding
WEIGHT, TOKENS = "weight of the head", "embedded tokens"
READY = "gradients are ready"  # marks the moment in a trace
_GATHERED = ("FSDP::all_gather", "FSDP::pre_", "fsdp::all_gather")  # of FSDP2: weights of other ranks
_COPIES = ("aten::_to_copy", "aten::to")
_OWN = ("lmworks::", "_CachedNorm")  # operators that cast what is no weight


@dataclass(frozen=True)
class Allocation:
    """Memory that came (bytes > 0) or went: its address, when (ns), and the names of the operators around it, innermost last."""

    time: int
    address: int
    bytes: int
    inside: tuple[str, ...]


def allocations(tree: Any, device: str) -> list[Allocation]:
    """Those of a device ("cpu", "cuda") in the profiler's tree of events, in their order."""
    found: list[Allocation] = []
    stack: list[tuple[Any, tuple[str, ...]]] = [(node, ()) for node in tree]
    while stack:
        node, inside = stack.pop()
        kind, fields = node.typed
        if str(kind).endswith("Allocation"):
            if str(fields.device).split(":")[0] == device:
                found.append(Allocation(node.start_time_ns, fields.ptr, fields.alloc_size, inside))
        else:
            inside = (*inside, node.name)
        before, in_head = "", node.name in _HEAD
        for child in node.children:
            cast = child.name in _COPIES
            mark = (WEIGHT,) if cast and in_head else (TOKENS,) if cast and before == "aten::embedding" else ()
            in_head = in_head and not cast
            stack.append((child, (*inside, *mark)))
            before = child.name
    return sorted(found, key=lambda one: one.time)


def times_of(tree: Any, name: str) -> list[int]:
    """When (ns) what has this name in the trace begins, in order."""
    return sorted(node.start_time_ns for node in _walk(tree) if node.name == PREFIX + name)


def gradient_events(events: Sequence[Allocation], ready: Sequence[tuple[int, Collection[int]]]) -> set[int]:
    """The numbers of the events by which gradients came. `ready`: when the gradients of an update were complete (ns), and their addresses:
    what came last to an address until then is one, and other memory may have been there before."""
    found: set[int] = set()
    latest: dict[int, int] = {}
    at = 0
    for time, addresses in ready:
        while at < len(events) and events[at].time <= time:
            if events[at].bytes > 0:
                latest[events[at].address] = at
            at += 1
        found |= {latest[address] for address in addresses if address in latest}
    return found


def peak(events: Sequence[Allocation], gradients: Collection[int], copies: Collection[int]) -> dict[str, float]:
    """The bytes of each kind when these events have most, without `gradients` (numbers of events), which exist whole at the end of each
    step. `copies`: the sizes of weights in the type of the computation. Memory that goes without having come was there before and does
    not count."""
    alive: dict[int, tuple[int, str]] = {}
    kinds: dict[str, float] = {}
    total = highest = 0.0
    at_peak: dict[str, float] = {}
    for number, event in enumerate(events):
        if event.bytes > 0:
            kind = "" if number in gradients else _kind(event, copies)
            alive[event.address] = event.bytes, kind
            change = float(event.bytes)
        elif event.address in alive:
            size, kind = alive.pop(event.address)
            change = -float(size)
        else:
            continue
        if not kind:
            continue
        kinds[kind] = kinds.get(kind, 0.0) + change
        total += change
        if total > highest:
            highest, at_peak = total, dict(kinds)
    return at_peak


def _kind(event: Allocation, copies: Collection[int]) -> str:
    names = event.inside
    if WEIGHT in names:
        return "weights"
    if any(part in name for name in names for part in _HEAD):
        return "logits"
    if TOKENS in names:
        return "activations"
    if any(name.startswith(_GATHERED) for name in names):
        return "weights"
    if event.bytes in copies and any(name.startswith(_COPIES) for name in names) and not any(name.startswith(_OWN) for name in names):
        return "weights"
    if PREFIX + WHOLE in names or PREFIX + FORWARD in names or any(name.startswith("autograd::engine") for name in names):
        return "activations"
    return "other"


def exposed(tree: Any) -> dict[str, float]:
    """The share of the time of each part of the step in which a collective ran and no operator computed, without the parts inside it; "" is
    what is outside all parts."""
    ranges, collectives, computing = _intervals(tree)
    waits = _without(_union(collectives), _union(computing))
    found: dict[str, float] = {}
    left = _union([(node.start_time_ns, node.end_time_ns) for node in _walk(tree)])
    for name, inside in [*ranges, ("", left)]:
        own = _without(left, _without(left, _union(inside)))
        waited = _without(waits, _without(waits, own))
        found[name] = _length(waited) / _length(own) if own else 0.0
        left = _without(left, own)
    return found


Interval = tuple[int, int]


def _intervals(tree: Any) -> tuple[list[tuple[str, list[Interval]]], list[Interval], list[Interval]]:
    """The intervals of the parts (the inner ones first), of collectives, and of operators that compute."""
    parts: dict[str, list[Interval]] = {}
    collectives: list[Interval] = []
    computing: list[Interval] = []
    for node in _walk(tree):
        span, name = (node.start_time_ns, node.end_time_ns), node.name
        if name.startswith(PREFIX):
            parts.setdefault(name.removeprefix(PREFIX), []).append(span)
        elif name.startswith(("gloo:", "nccl:")):
            collectives.append(span)
        elif name.startswith("aten::") and not any(child.name.startswith("aten::") for child in node.children):
            computing.append(span)
    return sorted(parts.items(), key=lambda one: one[0] == WHOLE), collectives, computing


def _walk(tree: Any) -> Iterator[Any]:
    stack = list(tree)
    while stack:
        node = stack.pop()
        if not str(node.typed[0]).endswith("Allocation"):
            yield node
        stack += node.children


def _union(spans: list[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        elif stop > start:
            found.append((start, stop))
    return found


def _length(spans: list[Interval]) -> int:
    return sum(stop - start for start, stop in spans)


def _without(spans: list[Interval], taken: list[Interval]) -> list[Interval]:
    """What is left of disjoint sorted spans without others."""
    found, at = [], 0
    for start, stop in spans:
        while at < len(taken) and taken[at][1] <= start:
            at += 1
        number = at
        while number < len(taken) and taken[number][0] < stop:
            if taken[number][0] > start:
                found.append((start, taken[number][0]))
            start = max(start, taken[number][1])
            number += 1
        if start < stop:
            found.append((start, stop))
    return found
