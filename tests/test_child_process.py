"""A process that a test starts ends with the test, whatever ends that."""

from __future__ import annotations

import signal
import sys

import pytest

from child_process import child_process


def test_a_failed_assertion_does_not_wait_for_the_process() -> None:
    with pytest.raises(AssertionError, match="failed"), child_process([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        raise AssertionError("failed")
    assert process.returncode == -signal.SIGKILL
