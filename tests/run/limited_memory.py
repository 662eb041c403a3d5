"""`python limited_memory.py MIB WORDS...`: lmworks WORDS with MIB of address space more than the process has after its imports."""

from __future__ import annotations

import resource
import sys
from importlib import import_module

from lmworks.cli.main import main
from lmworks.train.observe.memory_kinds import process_bytes

IMPORTED = ("evaluate.in_loop", "export.huggingface", "plan.plan", "run.runner", "run.start_weights", "train.pretrain")

if __name__ == "__main__":
    for name in IMPORTED:
        import_module(f"lmworks.{name}")
    more = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (int(process_bytes("VmSize")) + more,) * 2)
    sys.argv = ["lmworks", *sys.argv[2:]]
    main()
