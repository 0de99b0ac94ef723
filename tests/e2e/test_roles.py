"""Encoders and decoders in servers of their own: the same answers, and what happens when a partner is late or gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pictures import picture
from running import RunningServer

import saccade
from service.cli import ServerProcess

OPTIONS = {"max_seqs": 8, "max_len": 600}


def encoder(model: Path, *arguments: str) -> ServerProcess:
    return ServerProcess(
        [str(model), "--role", "encoder", "--dtype", "float32", "--threads", "1", "--log-level", "warning", *arguments]
    )


def decoder(model: Path, *encoders: ServerProcess, **options: Any) -> RunningServer:
    addresses = tuple(server.address for server in encoders)
    return RunningServer(str(model), role="decoder", encoders=addresses, **{**OPTIONS, **options})


def ask(client: Any, number: int, **options: Any) -> saccade.Generation:
    return client.generate("what is it", images=[picture(number)], max_tokens=8, ignore_eos=True, **options)


def test_remote_equals_local(model: Path, client: saccade.Client) -> None:
    """Greedy and sampled, one picture and several, and a picture that is asked for again."""
    requests: list[dict[str, Any]] = [
        {"images": [picture(1)], "temperature": 0},
        {"images": [picture(2), picture(3), picture(1)], "seed": 7},
        {"images": [picture(2)], "temperature": 0},
        {"images": [], "seed": 3},
    ]
    with encoder(model) as one, decoder(model, one) as running, saccade.Client(running.address) as remote:
        for request in requests:
            got = [c.generate("tell me", max_tokens=12, ignore_eos=True, **request) for c in (client, remote)]
            assert got[0].token_ids == got[1].token_ids
        stats = running.drained()["encoder"]
        assert (stats["given"], stats["written"], stats["under_way_now"]) == (3, 3, 0)
