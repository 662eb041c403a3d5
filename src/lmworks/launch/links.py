"""The links between ranks: measured by ranks that the launcher starts, as in training, and each compared with the others of its kind.

An all-reduce goes at the pace of the slowest link, so one bad cable slows down all ranks, and no check of a single host shows it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.health.report import Checked, Result
from lmworks.io.files import read_json, temporary_folder, write_text
from lmworks.launch.launch_dir import LaunchDir, reason_of_end
from lmworks.launch.launcher import Launch, launch_local, launch_on_hosts
from lmworks.launch.torchrun import CountRange, Host, read_table
from lmworks.recipe.schema.launch import Launch as LaunchOptions
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Seconds
from lmworks.ui.amounts import size
from lmworks.ui.exit_codes import ExitCode
from lmworks.ui.terminal import output_to

RECIPE, FOUND = "recipe.json", "links.json"  # files of the folder through which the ranks are told, and tell
_START, _ROUND = 300.0, 3.0  # seconds: to start Python and torch on a cold disk and to connect; for each round of pairs, also on 1 Gbit/s
_TIMEOUT = "60 s"  # of one collective
# A broken link does not become a little slower: one that trains at half of its lanes or of its rate, one of two ports, or TCP in place of
# InfiniBand leaves half of the speed or less. A healthy link has 1. The limit is as far from the one as from the other, in ratio.
_SLOW = 0.5**0.5  # of the median
_CLOCKS = 1.0  # seconds by which the clocks of two hosts may differ
_NAMED = 8


def rounds_of(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """All pairs that are measured, by rounds; `hosts` has the host of each rank. In a round each rank is in at most one pair.

    First the pairs within hosts, then those between hosts: rank i of one with rank i of another, which are the links that rings use. The
    pairs of a round are of one kind, and as many of each host, so each shares its host's links with equally many others.
    """
    groups = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    within = [
        [(own[first], own[second]) for own in groups for first, second in pairs if second < len(own)]
        for pairs in _tournament(max(map(len, groups)))
    ]
    between = [
        [pair for first, second in pairs for pair in zip(groups[first], groups[second], strict=False)] for pairs in _tournament(len(groups))
    ]
    return [[(min(pair), max(pair)) for pair in pairs] for pairs in [*within, *between]]


def _tournament(count: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which each of `count` players meets each other one once, the smaller number first (the circle method)."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(players) - 1):
        pairs = zip(players[: len(players) // 2], reversed(players), strict=False)
        yield sorted((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None)
        players = [players[0], players[-1], *players[1:-1]]


@dataclass(frozen=True)
class _Pair:
    """Two ranks, the seconds of a minimal message, and the bytes per second of a large one in the slower direction."""

    first: int
    second: int
    latency: float
    rate: float


def judge(found: Mapping[str, Any]) -> list[Checked]:
    """The results of what the ranks have measured (`lmworks.launch.link_rank`)."""
    hosts: list[str] = found["hosts"]
    names, pairs = _names(hosts), list[_Pair]()
    for one in found["pairs"]:  # agents get their ranks in any order; a pair has one name in all measurements
        first, second = sorted((int(one[0]), int(one[1])), key=names.__getitem__)
        pairs.append(_Pair(first, second, float(one[2]), float(one[3])))
    latency, rate = found["all_reduce"]
    where = f"{len(hosts)} ranks on {_count(len(set(hosts)), 'host')} ({found['backend']})"
    figures = {"latency_seconds": float(latency), "bytes_per_second": float(rate)}
    checks = [
        Checked("all_reduce", "all-reduce", Result("ok", f"{where}: {_speed(latency, rate)} on each link of a ring", figures=figures))
    ]
    for name, inside, where in (("links_within", True, "within a host"), ("links_between", False, "between hosts")):
        if alike := [pair for pair in pairs if (hosts[pair.first] == hosts[pair.second]) == inside]:
            checks.append(Checked(name, f"links {where}", _judge_pairs(alike, names, where)))
    if len(set(hosts)) > 1:
        checks.append(Checked("clocks", "clocks of the hosts", _judge_clocks(found["clocks"])))
    return checks


def _judge_pairs(pairs: Sequence[_Pair], names: Sequence[str], where: str) -> Result:
    """Pairs far below the median of all, and ranks of which even the best pair is far below those of the other ranks: of three hosts, a bad
    one is in two of three pairs, so that their median is bad too."""
    figures = dict[str, float]()
    for pair in pairs:
        key = f"{names[pair.first]}-{names[pair.second]}"
        figures |= {f"{key}/latency_seconds": pair.latency, f"{key}/bytes_per_second": pair.rate}
    slowest = min(pairs, key=lambda pair: pair.rate)
    if len(pairs) == 1:
        text = f"1 pair {where}: {_speed(slowest.latency, slowest.rate)}; there is no other to compare it with"
        return Result("ok", text, figures=figures)
    median = statistics.median(pair.rate for pair in pairs)
    best: dict[int, float] = defaultdict(float)
    for pair in pairs:
        for rank in (pair.first, pair.second):
            best[rank] = max(best[rank], pair.rate)
    usual = statistics.median(best.values())
    slow_ranks = {rank for rank, rate in best.items() if rate < _SLOW * usual} if len(best) > 2 else set()
    slow_pairs = sorted(
        (pair for pair in pairs if pair.rate < _SLOW * median and not slow_ranks & {pair.first, pair.second}), key=lambda pair: pair.rate
    )
    both = lambda pair: f"{names[pair.first]} and {names[pair.second]}"  # noqa: E731
    text = (
        f"{len(pairs)} pairs {where}: median {size(median)}/s, the slowest {both(slowest)} with {_speed(slowest.latency, slowest.rate)} "
        f"({slowest.rate / median:.0%})"
    )
    if not slow_ranks and not slow_pairs:
        return Result("ok", text, figures=figures)
    slow = [f"every pair of {names[rank]} is slow, the best has {best[rank] / usual:.0%} of that of others" for rank in sorted(slow_ranks)]
    slow += [f"{both(pair)} have {pair.rate / median:.0%} of the median" for pair in slow_pairs]
    more = f"; and {len(slow) - _NAMED} more" if len(slow) > _NAMED else ""
    advice = "check cables, ports and PCIe width of these, and that both use the same interface (NCCL_SOCKET_IFNAME, NCCL_IB_HCA)"
    return Result("fail", f"{'; '.join(slow[:_NAMED])}{more}; {text}", advice, figures)


def _judge_clocks(clocks: Mapping[str, Sequence[float]]) -> Result:
    """Compare the clocks of hosts with their median."""
    median = statistics.median(offset for offset, _ in clocks.values())
    off = {host: offset - median for host, (offset, _) in clocks.items()}
    error = max(error for _, error in clocks.values())
    figures = {f"{host}/skew_seconds": value for host, value in off.items()}
    limit = _CLOCKS if len(off) > 2 else _CLOCKS / 2  # the median of two lies between them, and both are named
    wrong = {host: value for host, value in off.items() if abs(value) - clocks[host][1] > limit}
    if wrong:
        how = "; ".join(f"{host} is {abs(value):,.1f} s {'ahead' if value > 0 else 'behind'}" for host, value in wrong.items())
        return Result("fail", f"of the median of {len(off)} clocks, {how}", "set the clocks: chronyc makestep", figures)
    apart = max(off.values()) - min(off.values())
    return Result("ok", f"the clocks of {len(off)} hosts are within {1e3 * (apart + error):,.1f} ms", figures=figures)


def _names(hosts: Sequence[str]) -> list[str]:
    """The name of each rank: that of its host, with the number on it where it has several."""
    places = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    return [f"{host}:{place}" if hosts.count(host) > 1 else host for host, place in zip(hosts, places, strict=True)]


def _speed(latency: float, rate: float) -> str:
    return f"{1e6 * latency:,.0f} us, {size(rate)}/s"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


_ONE_RANK = Checked("links", "links between ranks", Result("skip", "there is only one rank"))


def measure_here(options: LaunchOptions, parent: Path, ranks: int) -> list[Checked]:
    """Measure the links between ranks on this machine. `parent`: a folder in which files are made for a while."""
    if ranks < 2:
        return [_ONE_RANK]
    return _measure(options, parent, lambda recipe, folder: launch_local(recipe, folder, CountRange(ranks, ranks), [str(folder)]))


def measure_hosts(options: LaunchOptions, parent: Path, hosts: Sequence[Host], address: str | None) -> list[Checked]:
    """Measure the links between hosts, with `slots` ranks on each. `parent`: a folder that all see under this path; `address`: where they
    reach this machine."""
    if sum(host.slots for host in hosts) < 2:
        return [_ONE_RANK]
    return _measure(options, parent, lambda recipe, folder: launch_on_hosts(recipe, folder, hosts, None, [str(folder)], address))


def _measure(options: LaunchOptions, parent: Path, launch: Callable[[Recipe, Path], Launch]) -> list[Checked]:
    """`options`: how a run on these hosts is launched, with its environment variables."""
    own = {"timeout": Seconds.parse(_TIMEOUT), "max_restarts": 0, "health_check": False, "grace_period": Seconds.parse("5 s")}
    recipe = Recipe(name="links", launch=options.model_copy(update=own))
    try:
        with temporary_folder(parent, ".lmworks-links-") as folder:
            write_text(folder / RECIPE, recipe.model_dump_json())
            made = launch(recipe, folder)
            rounds = rounds_of([host.name for host in made.hosts for _ in range(host.slots)])
            files = LaunchDir.of(folder)
            files.logs.mkdir(parents=True)
            try:
                with output_to(files.logs / "output.log"):  # also what ssh says
                    code = replace(made, module="lmworks.launch.link_rank", limit=_START + _ROUND * len(rounds)).run()
                if code == ExitCode.INTERRUPTED:
                    raise KeyboardInterrupt
                if code == ExitCode.OK:
                    return judge(read_json(folder / FOUND))
                why = reason_of_end(folder)
            except UserError as error:
                why = str(error)
            # a host that the launcher has excluded says more than that too few are left
            lost = [f"{host.name}: {host.excluded}" for host in read_table(files.hosts) if host.excluded]
            why = ("; ".join(lost) or why).replace(f"{files.logs}/", "")
            why += f"; their last line: {words}" if (words := files.last_words()) and words not in why else ""
    except OSError as error:
        return [_not_measured(f"{parent} cannot be written ({error.strerror or error})", "choose a folder that all hosts can write")]
    return [_not_measured(why, "see that the hosts reach each other and this machine (--address), and share this folder")]


def _not_measured(why: str, advice: str) -> Checked:
    return Checked("links", "links between ranks", Result("fail", why, advice))
