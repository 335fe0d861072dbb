"""The door of zstd: level 1, which halves a payload for a fraction of a millisecond."""

import sys

if sys.version_info >= (3, 14):
    from compression.zstd import CompressionParameter, ZstdCompressor, ZstdDecompressor
    from compression.zstd import compress as _compress
else:
    from backports.zstd import CompressionParameter, ZstdCompressor, ZstdDecompressor
    from backports.zstd import compress as _compress

LEVEL = 1
"""Higher levels cost several times as much for a few per cent: token ids and logprobs are close to noise."""


def compress(body: bytes) -> bytes:
    return _compress(body, level=LEVEL)


class StreamCompressor:
    """Packs a stream piece by piece; what was fed can be read by the other side at once."""

    def __init__(self) -> None:
        self._packer = ZstdCompressor(options={CompressionParameter.compression_level: LEVEL})

    def feed(self, piece: bytes) -> bytes:
        return self._packer.compress(piece, ZstdCompressor.FLUSH_BLOCK)

    def end(self) -> bytes:
        return self._packer.flush()


def decompress(body: bytes, *, at_most: int) -> bytes:
    """Unpack, never to more than `at_most` bytes; raises `ValueError` beyond."""
    unpacker = ZstdDecompressor()
    unpacked = unpacker.decompress(body, max_length=at_most + 1)
    if len(unpacked) > at_most or not unpacker.eof:
        raise ValueError(f"it unpacks to more than {at_most} bytes, or is cut off")
    return unpacked
