"""What `torchrun` starts: `python -m lmworks.cli.rank COMMAND...` is `lmworks COMMAND...` as one rank of a launched run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lmworks.cli.main import main
from lmworks.launch.launch_dir import VARIABLE, LaunchDir
from lmworks.launch.rank import run_rank

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    if rank and "--debug" not in sys.argv:
        sys.argv.append("--debug")  # into its log
    code = run_rank(LaunchDir(Path(os.environ[VARIABLE])), rank, main)
    # Not sys.exit: after a failed collective, the end of the interpreter would wait for threads of the group.
    os._exit(code)
