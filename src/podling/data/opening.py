"""Opening a file's bytes, through .gz and .zst, with damage told by name."""

import contextlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

from podling.errors import InputError, Problem

Compression = Literal["", "gz", "zst"]
_ZST_READ_BYTES = 1 << 14  # zstandard may give 20,000 times as much


@contextlib.contextmanager
def open_bytes(path: Path, compression: Compression) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file, as a buffered stream.

    Raises:
        InputError: it cannot be read, or is damaged or cut short (also while the stream is used).
    """
    broken: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    if compression == "zst":
        import zstandard

        broken = (*broken, zstandard.ZstdError)
    try:
        with contextlib.ExitStack() as stack:
            stream: IO[bytes] = stack.enter_context(open(path, "rb"))
            if compression == "gz":
                import gzip

                stream = stack.enter_context(gzip.GzipFile(fileobj=stream))  # pyright: ignore[reportAssignmentType]
            elif compression == "zst":
                stream = io.BufferedReader(_ZstStream(stream))  # pyright: ignore[reportArgumentType, reportAssignmentType]
            yield stream
    except broken as error:
        what = f"is damaged or not .{compression}: {error}" if compression else f"cannot be read: {error}"
        raise InputError(Problem(str(path), what, "leave the file out, or fetch it again")) from error


class _ZstStream(io.RawIOBase):
    """Frames one after another; unlike zstandard's own reader it does not take a cut file for a whole one."""

    def __init__(self, file: IO[bytes]):
        import zstandard

        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._output:
            self._input = self._input or self._file.read(_ZST_READ_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._output = self._frame.decompress(self._input)
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count
