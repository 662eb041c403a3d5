"""Starts the ranks of a layout on this machine for a profile, each a process that profiles with the others; the first prints the result."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lmworks.errors import UserError
from lmworks.host import machine

_MOST_PER_CORE = 4  # ranks on a CPU
_AFTER = 5.0  # seconds that the others have to end once one has failed


def require_room(ranks: int) -> None:
    """Raise `UserError` if this machine cannot be expected to run so many ranks."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    most = gpus or _MOST_PER_CORE * machine.cores()
    if ranks > most:
        raise UserError(
            f"the layout has {ranks:,} ranks, and this machine has room for {most}; profile on the machines of the run: lmworks launch "
            "hosts RECIPE --hosts FILE --to profile"
        )


def run_ranks(arguments: Sequence[str], ranks: int) -> str:
    """Run `lmworks ARGUMENTS` as so many ranks; returns what the first has printed. Raises `UserError` with the last line of a rank that
    has failed."""
    require_room(ranks)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    program = "from lmworks.cli.main import main; main()"
    with tempfile.TemporaryDirectory(prefix="lmworks-ranks-") as folder:
        processes = []
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
            environment = {**os.environ, **{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1"}
            with open(Path(folder) / f"{rank}.out", "wb") as out, open(Path(folder) / f"{rank}.err", "wb") as err:
                command = [sys.executable, "-c", program, *arguments]
                processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err))
        try:
            failed = _wait(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if failed:
            raise UserError(_reason(Path(folder), failed))
        return (Path(folder) / "0.out").read_text(encoding="utf-8", errors="replace")


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait until all have ended, or some seconds after one has failed; returns those that failed by themselves, the first to fail first."""
    failed: list[int] = []
    last = None
    while any(process.poll() is None for process in processes) and (last is None or time.monotonic() < last):
        time.sleep(0.05)
        for rank, process in enumerate(processes):
            if process.poll() and rank not in failed:
                failed.append(rank)
                last = last or time.monotonic() + _AFTER
    return failed or [rank for rank, process in enumerate(processes) if process.returncode]


def _reason(folder: Path, failed: Sequence[int]) -> str:
    """The error line of a rank, of one with an error of its own if there is such."""
    texts = {rank: (folder / f"{rank}.err").read_text(encoding="utf-8", errors="replace").strip().splitlines() for rank in failed}
    lines = {
        rank: next((line for line in reversed(text) if line.startswith("error: ")), text[-1] if text else "")
        for rank, text in texts.items()
    }
    rank = next((rank for rank, line in lines.items() if line.startswith("error: ") and "bug in lmworks" not in line), failed[0])
    return f"rank {rank}: {lines[rank].removeprefix('error: ') or 'it was killed'}"
