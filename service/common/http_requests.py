"""The words by which HTTP servers ask gRPC servers for what is no part of the API; the gRPC server's part is
`service.rpc.http_requests`."""

from __future__ import annotations

SERVICE = "saccade.private.HttpRequests"
HOLD = f"/{SERVICE}/Hold"
"""A call that stays open while an HTTP request of this `saccade serve` makes its calls. The server answers with an
empty message if it accepts the request."""
CHECK_KEY = f"/{SERVICE}/CheckKey"
"""A call that succeeds if the server knows the caller's key. It needs no scope, and is none of the key's requests per
minute."""
ACCEPTED = "x-saccade-accepted"
"""Metadata of a call that belongs to an accepted HTTP request."""
