"""A gRPC client for calls whose messages stop in the middle, which no gRPC library sends."""

from __future__ import annotations

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACK, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + body


def header(name: str, value: str) -> bytes:
    """An uncompressed HPACK literal without indexing (RFC 7541, 6.2.2). Up to 126 bytes each."""
    return b"\0" + b"".join(bytes([len(part)]) + part for part in (name.encode(), value.encode()))


class RawClient:
    """One connection. A context manager."""

    def __init__(self, address: str, window: int | None = None) -> None:
        """`window`: bytes of an answer that the server may send; None: the default, 65,535."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        settings = b"" if window is None else struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        self._stream = -1

    def begin(self, method: str, size: int, data: bytes = b"", key: str | None = None) -> int:
        """Begins a call whose message claims `size` bytes and sends the first ones of it. Returns the stream's
        number."""
        self._stream += 2
        fields = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "test"),
                  ("content-type", "application/grpc"), ("te", "trailers")]  # fmt: skip
        if key is not None:
            fields.append(("authorization", f"Bearer {key}"))
        block = b"".join(header(*pair) for pair in fields)
        self.socket.sendall(
            frame(HEADERS, END_HEADERS, self._stream, block)
            + frame(DATA, 0, self._stream, b"\0" + struct.pack(">I", size) + data)
        )
        return self._stream

    def until_begun(self) -> None:
        """Waits for the headers of an answer."""
        kind = None
        while kind != HEADERS:
            length, kind, _, _ = self._head()
            self._take(length)

    def answers(self, count: int) -> list[int]:
        """Numbers of ended streams in order, once there are `count`."""
        ended: list[int] = []
        while len(ended) < count:
            length, kind, flags, stream = self._head()
            self._take(length)
            if kind == HEADERS and flags & 1:
                ended.append(stream)
        return ended

    def until_closed(self) -> None:
        """Waits for the server's end of the connection, which comes as soon as its pings are answered."""
        while (head := self._taken(9)) is not None:
            body = self._taken(int.from_bytes(head[:3], "big"))
            if head[3] == PING and not head[4] & ACK and body is not None:
                self.socket.sendall(frame(PING, ACK, 0, body))

    def _head(self) -> tuple[int, int, int, int]:
        data = self._take(9)
        kind, flags, stream = struct.unpack(">BBI", data[3:])
        return int.from_bytes(data[:3], "big"), kind, flags, stream

    def _take(self, count: int) -> bytes:
        data = self._taken(count)
        assert data is not None, "the connection was closed"
        return data

    def _taken(self, count: int) -> bytes | None:
        """`count` bytes from the connection; None if it was closed before."""
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                return None
            data += part
        return data

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
