"""How long a test waits for what must come."""

import os

PATIENCE = float(os.environ.get("LMWORKS_PATIENCE", 900))
"""Seconds: only a bound against waiting for ever, also on a machine with many other things to do. Shorter where a mistake is planted on
purpose: what waits for it in vain must fail within the time of its tests."""
