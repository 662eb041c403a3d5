"""Checks of the network of a node: ports of InfiniBand adapters, addresses that must be reached, and ports that must be free."""

from __future__ import annotations

import re
import socket
from collections import Counter

from lmworks.health.node import Node, NotThere
from lmworks.health.report import Result

_SECONDS = 5.0  # to connect


def infiniband(node: Node) -> Result:
    """State, physical state and rate of the ports in /sys/class/infiniband (Linux's Documentation/ABI/stable/sysfs-class-infiniband)."""
    ports = node.paths("/sys/class/infiniband", "*/ports/*")
    if not ports:
        raise NotThere("there is no InfiniBand or RoCE adapter")
    up, down, figures = dict[str, float](), [], {}
    for port in ports:
        name = "/".join(port.split("/")[4::2])  # mlx5_0/1
        state, physical, rate = ((node.read(f"{port}/{key}") or "") for key in ("state", "phys_state", "rate"))
        speed = re.match(r"([\d.]+) Gb", rate)
        for key in ("symbol_error", "link_downed", "link_error_recovery"):
            if count := node.number(f"{port}/counters/{key}"):
                figures[f"{name}/{key}"] = float(count)
        if "ACTIVE" in state:
            up[name] = float(speed[1]) if speed else 0.0
        else:
            down.append(
                f"{name} is {state.partition(': ')[2].lower() or 'in an unknown state'} ({physical.partition(': ')[2] or physical})"
            )
    figures |= {f"{name}/rate_gbps": rate for name, rate in up.items()} | {"active_ports": float(len(up))}
    advice = "check cable and switch of the port (ibstat, ibdiagnet); a port that is not meant to be used needs no link"
    if not up:
        return Result("fail", "no port is active: " + "; ".join(down), advice, figures)
    usual = Counter(up.values()).most_common(1)[0][0]
    slow = [f"{name} runs at {rate:g} Gb/s, others at {usual:g}" for name, rate in up.items() if rate < usual]
    if slow:
        return Result("fail", "; ".join(slow + down), advice, figures)
    text = f"{len(up)} ports active at {usual:g} Gb/s"
    return Result("warn", "; ".join([text, *down]), advice, figures) if down else Result("ok", text, figures=figures)


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, also [::1]:PORT. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(text)
    return host.strip("[]"), int(port)


def reach(addresses: tuple[str, ...]) -> Result:
    """Whether this node can connect to the rendezvous of the launcher, or to other addresses."""
    lost, figures = [], {}
    for address in addresses:
        try:
            figures[f"{address}/connect_seconds"] = connect_seconds(*parse_address(address))
        except OSError as error:
            lost.append(f"{address}: {error.strerror or error}")
    if lost:
        return Result(
            "fail", f"cannot connect to {'; '.join(lost)}", "check name resolution, routes and firewall (launch hosts: --address)", figures
        )
    return Result("ok", f"{', '.join(addresses)} can be reached", figures=figures)


def connect_seconds(host: str, port: int) -> float:
    """Seconds to connect. Raises OSError."""
    import time

    began = time.perf_counter()
    with socket.create_connection((host, port), timeout=_SECONDS):
        return time.perf_counter() - began


def free_ports(ports: tuple[int, ...]) -> Result:
    """Whether these ports can be listened on; without any, whether the system has a free one."""
    taken = []
    for port in ports or (0,):
        try:
            with socket.create_server(("", port)):
                pass
        except OSError as error:
            taken.append(f"{port or 'any port'}: {error.strerror}")
    if taken:
        return Result(
            "fail", f"cannot listen on {'; '.join(taken)}", "find the process with: ss -ltnp; end it by its id, or use another port"
        )
    return Result("ok", f"{', '.join(map(str, ports))} free" if ports else "ports are free")
