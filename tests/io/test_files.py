"""Reading files."""

from __future__ import annotations

import io

from lmworks.io.files import read_at_most


def test_memory_of_a_bounded_read_follows_what_there_is() -> None:
    """`read(most)` of a buffered file reserves all of `most` before it reads: 64 MiB for each record of a run."""

    class Recorded(io.BytesIO):
        largest = 0

        def read(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            self.largest = max(self.largest, size)
            return super().read(size)

    data = bytes(range(256)) * 4000
    for most, found in ((1 << 40, data), (len(data), data), (700_001, data[:700_001]), (1, data[:1]), (0, b"")):
        stream = Recorded(data)
        assert read_at_most(stream, most) == found
        assert stream.largest <= 1 << 18
