"""The C library's memory allocator, for training on CPUs."""

from __future__ import annotations

import ctypes

# From malloc.h of glibc. Both are an int; larger requests are mapped afresh each time.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, where the C library is glibc; whether that was possible.

    A step frees hundreds of tensors and makes their like again. glibc gives large ones back to the kernel, which clears every page
    anew for the next: a tenth of a step (LOG.md). The process stays as large as its largest step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(_MMAP_THRESHOLD, _LARGEST), mallopt(_TRIM_THRESHOLD, _LARGEST)])
