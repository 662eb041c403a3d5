"""The C library's memory allocator, for training on CPUs."""

from __future__ import annotations

import ctypes

# From malloc.h of glibc. Both are an int; larger requests are mapped anew each time.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Let this process keep freed memory, if the C library is glibc; returns whether that was possible.

    A training step frees hundreds of tensors and allocates similar ones in the next step. glibc returns large ones to the kernel, which
    clears every page again: a tenth of a step (LOG.md). The process stays as large as its largest step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(_MMAP_THRESHOLD, _LARGEST), mallopt(_TRIM_THRESHOLD, _LARGEST)])


def return_freed_memory() -> None:
    """Give memory that this process has freed and kept back to the kernel, if the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
