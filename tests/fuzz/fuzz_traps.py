"""Cases that do what the campaign must find, so that a test can see it find them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

from fuzz_campaign import Case

from lmworks.errors import UserError

TRAPS = ("nothing", "refuses", "raises", "two lines", "loops", "waits", "memory", "outside", "exits", "crashes")


class Traps:
    """Each case is one of the traps."""

    def prepare(self) -> None:
        pass

    def begin(self) -> None:
        pass

    def case(self, draw: Random) -> Case:
        return {"trap": draw.choice(TRAPS)}

    def run(self, case: Case, folder: Path) -> str:
        match case["trap"]:
            case "refuses":
                raise UserError("no")
            case "raises":
                raise KeyError("x")
            case "two lines":
                error = UserError("one")
                error.args = ("one\ntwo",)  # which no message of ours can be
                raise error
            case "loops":
                while True:
                    pass
            case "waits":
                time.sleep(1e6)
            case "memory":
                bytes(1 << 40)
            case "outside":
                (folder.parent.parent / "outside").write_text("x", encoding="utf-8")
            case "exits":
                os._exit(0)
            case "crashes":
                os.abort()
        (folder / "inside").write_text("x", encoding="utf-8")
        return "done"
