"""The words by which the HTTP process of `saccade serve` makes several gRPC calls as one request; the server's part is
`service.rpc.http_requests`."""

from __future__ import annotations

SERVICE = "saccade.private.HttpRequests"
HOLD = f"/{SERVICE}/Hold"
"""A call that stays open while an HTTP request makes its calls. The server answers with an empty message if it accepts
the request."""
ACCEPTED = "x-saccade-accepted"
"""Metadata of a call that belongs to an accepted HTTP request."""
