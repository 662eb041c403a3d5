"""lmworks: raw text to a language model that people can talk to."""

import os

__version__ = "0.1.0"

# Must stand before torch is imported. OpenMP threads that spin while they wait for each other take the core away from the thread
# they wait for as soon as another program wants one: training then runs at a tenth of its speed, not at half (LOG.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Likewise: tensors on CPUs lie in pages of 2 MB where Linux has them, which need clearing and looking up less often.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
