"""Keeps JAX's own connection to process 0 from breaking before podling has spoken.

JAX's client aborts its process, in C++ and with a stack trace, at the moment its connection to the coordinator closes;
a process whose coordinator is killed would end without a word a person can use. Through the relay that connection
stays open and silent, so JAX waits for its heartbeat time-out, and the register's news comes first.
"""

import contextlib
import socket
import threading

_kept: list[socket.socket] = []
"""Sockets close when nobody holds them."""


def relay(host: str, port: int) -> int:
    """Pass connections to a free port of this machine on to `host:port`; returns that port."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, (host, port)), name="relay", daemon=True).start()
    return listener.getsockname()[1]


def _accept(listener: socket.socket, there: tuple[str, int]) -> None:
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(there, timeout=10)
        except OSError:
            near.close()  # JAX tries again
            continue
        far.settimeout(None)
        _kept.extend((near, far))
        for source, target in ((near, far), (far, near)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_copy, args=(source, target), name="relay", daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Until either side ends; then nothing is closed, which is the point."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
