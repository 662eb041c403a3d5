"""Links between ranks: which pairs are measured, what is said of them, and real ranks that measure each other."""

from __future__ import annotations

import json
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from lmworks.health.report import Result
from lmworks.launch import links
from lmworks.launch.link_rank import measured
from lmworks.launch.links import judge, measure_here, measure_hosts, rounds_of
from lmworks.launch.torchrun import Host
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.launch import Launch
from lmworks.recipe.schema.layout import Layout
from rank_pool import RankPool


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "abc", "aabb", "aaabbb", "abcde", "aaaabbbbccccdddd", "aab", "abab"])
def test_every_pair_of_a_kind_is_measured_once_and_no_rank_twice_at_a_time(hosts: str) -> None:
    rounds = rounds_of(hosts)
    for pairs in rounds:
        taken = [rank for pair in pairs for rank in pair]
        assert len(taken) == len(set(taken))
        assert len({hosts[first] == hosts[second] for first, second in pairs}) <= 1, "links of two kinds at a time"
    place = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    wanted = [(a, b) for a, b in combinations(range(len(hosts)), 2) if hosts[a] == hosts[b] or place[a] == place[b]]
    assert sorted(pair for pairs in rounds for pair in pairs) == wanted


def found(hosts: str, rates: dict[str, float], clocks: dict[str, tuple[float, float]] | None = None) -> dict[str, Result]:
    """What is said of ranks on these hosts; `rates` in GB/s by two ranks, such as 03, and `usual` of the others."""
    pairs = [[a, b, 2e-5, 1e9 * rates.get(f"{a}{b}", rates["usual"])] for pairs in rounds_of(hosts) for a, b in pairs]
    tree: dict[str, Any] = {"backend": "gloo", "hosts": list(hosts), "all_reduce": [3e-5, 5e9], "pairs": pairs}
    checks = judge(json.loads(json.dumps(tree | {"clocks": clocks or dict.fromkeys(hosts, (0.0, 1e-4))})))
    return {checked.name: checked.result for checked in checks}


def test_a_single_pair_has_numbers_and_no_verdict() -> None:
    said = found("aa", {"usual": 0.001})
    assert said["links_within"].status == "ok" and "20 us, 1.0 MB/s; there is no other" in said["links_within"].text
    assert said["links_within"].figures == {"a:0-a:1/latency_seconds": 2e-5, "a:0-a:1/bytes_per_second": 1e6}
    assert set(said) == {"all_reduce", "links_within"} and "2 ranks on 1 host (gloo): 30 us, 5.0 GB/s" in said["all_reduce"].text
    assert found("ab", {"usual": 0.001})["links_between"].status == "ok"


def test_a_slow_pair_is_named_beside_the_median() -> None:
    said = found("abcd", {"usual": 10.0, "13": 5.0})["links_between"]
    assert said.status == "fail" and said.text.startswith("b and d have 50% of the median; 6 pairs between hosts: median 10.0 GB/s")
    assert said.figures["b-d/bytes_per_second"] == 5e9 and said.advice
    said = found("abcd", {"usual": 10.0, "13": 8.0})["links_between"]
    assert said.status == "ok" and "the slowest b and d with 20 us, 8.0 GB/s (80%)" in said.text


def test_a_pair_has_one_name_whichever_of_its_hosts_has_the_first_rank() -> None:
    """The rendezvous gives ranks in the order of addresses and process IDs, which differs from one measurement to the next."""
    first, second = (found(hosts, {"usual": 10.0, slow: 5.0})["links_between"] for hosts, slow in (("abcd", "13"), ("dcba", "02")))
    assert first.figures == second.figures and first.text.partition(";")[0] == second.text.partition(";")[0]


@pytest.mark.parametrize("hosts", ["abc", "abcd", "abcdefgh"])
def test_a_host_all_of_whose_links_are_slow_is_named_and_not_its_pairs(hosts: str) -> None:
    """Of three hosts, it is in two of three pairs, whose median is slow."""
    last = len(hosts) - 1
    said = found(hosts, {"usual": 10.0} | {f"{other}{last}": 4.0 for other in range(last)})["links_between"]
    assert said.status == "fail" and said.text.startswith(f"every pair of {hosts[-1]} is slow, the best has 40% of that of others; ")


def test_links_are_compared_with_those_of_their_kind() -> None:
    said = found("aabb", {"usual": 10.0, "01": 300.0, "23": 300.0})
    assert said["links_within"].status == said["links_between"].status == "ok"
    assert set(said["links_between"].figures) == {f"a:{n}-b:{n}/{what}" for n in (0, 1) for what in ("latency_seconds", "bytes_per_second")}


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ({"a": 0.0, "b": 0.3, "c": 0.1}, "the clocks of 3 hosts are within 300.1 ms"),
        ({"a": 0.0, "b": -90.0, "c": 0.1}, "of the median of 3 clocks, b is 90.0 s behind"),
        ({"a": 0.0, "b": 3.0}, "of the median of 2 clocks, a is 1.5 s behind; b is 1.5 s ahead"),
        ({"a": 0.0, "b": 0.9}, "the clocks of 2 hosts are within 900.1 ms"),
    ],
)
def test_a_clock_is_compared_with_the_median(offsets: dict[str, float], said: str) -> None:
    result = found("".join(offsets), {"usual": 1.0}, {host: (offset, 1e-4) for host, offset in offsets.items()})["clocks"]
    assert result.text == said and (result.status == "fail") == ("median" in said)


def test_a_clock_that_cannot_be_read_so_exactly_is_not_wrong() -> None:
    assert found("abc", {"usual": 1.0}, {"a": (0.0, 0.0), "b": (0.1, 0.0), "c": (3.0, 2.5)})["clocks"].status == "ok"


def measured_by_ranks(hosts: str, ahead: dict[str, float]) -> dict[str, Any]:
    """On each rank; the clocks of some hosts are ahead by this many seconds."""
    import torch.distributed as dist

    ranks, honest = Ranks(Layout(dp_shard=len(hosts))), time.time
    host = hosts[dist.get_rank()]
    time.time = lambda: honest() + ahead.get(host, 0.0)
    try:
        return measured(ranks, host, lambda step, doing: None)
    finally:
        time.time = honest


def test_ranks_measure_each_other(ranks: RankPool) -> None:
    hosts = "aabb"
    for tree in ranks.run(measured_by_ranks, 4, hosts, {"b": 100.0}):
        assert tree["backend"] == "gloo" and tree["hosts"] == list(hosts)
        assert sorted(pair[:2] for pair in tree["pairs"]) == [[0, 1], [0, 2], [1, 3], [2, 3]]
        assert all(latency > 0 and rate > 0 for *_, latency, rate in tree["pairs"])
        assert tree["all_reduce"][0] > 0 and tree["all_reduce"][1] > 0
    first = ranks.run(measured_by_ranks, 4, hosts, {"b": 100.0})[0]
    offset, error = first["clocks"]["b"]
    assert first["clocks"]["a"] == (0.0, 0.0) and abs(offset - 100.0) <= error < 50.0
    said = {checked.name: checked.result for checked in judge(first)}
    assert said["clocks"].status == "fail" and set(said) == {"all_reduce", "links_within", "links_between", "clocks"}


SSH = """\
#!/bin/sh
# Runs the command on this machine, as sshd would, unless the host is down.
[ -e "{folder}/down-$1" ] && {{ echo "ssh: connect to host $1: No route to host" >&2; exit 255; }}
exec sh -c "$2"
"""


def over(tmp_path: Path, *down: str) -> Launch:
    for host in down:
        (tmp_path / f"down-{host}").touch()
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH.format(folder=tmp_path))
    ssh.chmod(0o755)
    return Launch(ssh=str(ssh))


def test_hosts_that_cannot_be_reached_are_named_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (checked,) = measure_hosts(over(tmp_path, "n1", "n2"), tmp_path, [Host("n1", 1), Host("n2", 1)], "127.0.0.1")
    assert checked.result.status == "fail" and "\n" not in checked.result.text
    assert "its agent exited with code 255" in checked.result.text and "No route to host" in checked.result.text
    assert not list(tmp_path.glob(".lmworks-links-*")), "what was made for a while is left"
    assert capfd.readouterr() == ("", ""), "the command prints JSON"


def test_one_rank_has_no_links(tmp_path: Path) -> None:
    (checked,) = measure_hosts(Launch(), tmp_path, [Host("n1", 1)], None)
    assert checked.result.status == "skip" and checked.result.text == "there is only one rank"
    assert measure_here(Launch(), tmp_path, 1) == [checked]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (checked,) = measure_here(Launch(), tmp_path / "file", 2)
    assert checked.result.status == "fail" and "cannot be written (Not a directory)" in checked.result.text


@pytest.mark.slow
def test_real_agents_on_three_hosts(tmp_path: Path) -> None:
    checks = measure_hosts(over(tmp_path), tmp_path, [Host(name, 1) for name in ("n1", "n2", "n3")], "127.0.0.1")
    assert [checked.name for checked in checks] == ["all_reduce", "links_between", "clocks"], checks
    figures = checks[1].result.figures
    assert {name.partition("/")[0] for name in figures} == {"n1-n2", "n1-n3", "n2-n3"} and min(figures.values()) > 0
    assert checks[2].result.status == "ok", "one machine has one clock"


@pytest.mark.slow
def test_ranks_that_do_not_end_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_START", 0.0)
    (checked,) = measure_here(Launch(), tmp_path, 2)
    assert checked.result.status == "fail" and "the ranks did not end within" in checked.result.text
