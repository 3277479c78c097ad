"""EventSink: the socket behind one stream of events, for who brings a token and cannot wait for the client.

An answer in HTTP's chunked coding (RFC 9112, 7.1) is a sequence of framed pieces, so a piece that is framed here may
stand between those that aiohttp writes. It costs a fraction of what waking the stream's task for a token does.

A client that is behind must be noticed soon, or what is written for it lies in buffers, each token in a chunk of its
own that is stale when it is read. A kernel alone would hold megabytes of that. So it is given little that cannot be
sent yet, and the transport makes writers wait for little more.
"""

import contextlib
import socket

from aiohttp import HttpVersion11, web

_MOST_UNTAKEN = 8 * 1024  # bytes that the transport holds, before writers wait until a quarter of it is left
_MOST_UNSENT = 8 * 1024  # bytes that the kernel holds because the client has no room for them


class EventSink:
    """Make it before the response is prepared. It is for what follows the first piece, which aiohttp writes together
    with the headers. In HTTP/1.0 there is no chunked coding: then nothing can be written here.
    """

    def __init__(self, request: web.Request, response: web.StreamResponse):
        self._transport = request.transport  # None: the client is gone already
        self._is_chunked = request.version >= HttpVersion11
        if self._is_chunked:
            response.enable_chunked_encoding()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.set_write_buffer_limits(high=_MOST_UNTAKEN)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                connection = self._transport.get_extra_info("socket")
                with contextlib.suppress(OSError):  # the client has just gone: whoever writes is told
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT)

    @property
    def is_ready(self) -> bool:
        """Whether something may be written here now: not when the client is behind, or gone."""
        transport = self._transport
        return self._is_chunked and transport is not None and not transport.is_closing() and not self.is_behind(0)

    def is_behind(self, num_bytes: int) -> bool:
        """Whether the client has not taken what was written, if so many bytes more are counted."""
        untaken = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return untaken + num_bytes > _MOST_UNTAKEN

    def write(self, events: bytes) -> None:
        """It must be ready. `events`: not empty, which would be the end."""
        assert self._transport is not None
        self._transport.write(b"%x\r\n%b\r\n" % (len(events), events))
