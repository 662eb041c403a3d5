"""lmworks: raw text to a language model that people can talk to."""

import os

__version__ = "0.1.0"

# Must be set before torch is imported. OpenMP threads that spin at barriers take the core away from the thread that they wait for as
# soon as another program runs: training then runs at a tenth of its speed, not at half (LOG.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Likewise: GPU memory in segments that can grow, so that sizes which change (phases, documents, validation) do not fragment it.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

# Likewise: allocate CPU tensors in huge pages of 2 MB if Linux supports them, which causes fewer page faults and TLB misses.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
