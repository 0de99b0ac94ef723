"""Clips and images over HTTP, as data URLs and as URLs of hosts that the operator allows or does not."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from certificates import Authority
from clips import animation, moving_frames
from images import png
from running import RunningServer
from running_http import RunningHttp
from served import make_served
from web_site import Site

import saccade

CLIP = animation(moving_frames(6, 24, 40, 1), "GIF")
QUESTION = "what moves?"
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    authority = Authority.create(tmp_path_factory.mktemp("site") / "ca")
    authority.issue("site")
    with Site(authority).in_thread() as site:
        site.says("/clip.gif", CLIP)
        site.says("/image.png", png(3))
        site.says("/notes.txt", b"no clip")
        yield site


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, site: Site) -> Iterator[RunningServer]:
    model = make_served(tmp_path_factory.mktemp("video") / "tiny").path
    rule = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(json.dumps(rule | {"video_target_num_patches": 24}))
    with RunningServer(
        str(model), max_seqs=4, max_len=900, image_url_hosts=(f"localhost:{site.port}",),
        image_url_networks=("127.0.0.0/8", "::1/128"), image_url_ca=str(site.authority.certificate),
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def client(http: RunningHttp, server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    http.idle()
    server.drained()


def asking(kind: str, url: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": kind, kind: {"url": url}, **fields}, {"type": "text", "text": QUESTION}]
    return {"model": "", "messages": [{"role": "user", "content": parts}], **GREEDY}


def test_clips_are_those_of_grpc(client: openai.OpenAI, grpc_client: saccade.Client, site: Site) -> None:
    expected = grpc_client.generate(QUESTION, videos=[CLIP], **GREEDY)
    assert expected.usage.video_frames == 6
    inline = f"data:image/gif;base64,{base64.b64encode(CLIP).decode()}"
    for url in (inline, f"https://localhost:{site.port}/clip.gif"):
        answer: Any = client.chat.completions.create(**asking("video_url", url))
        assert answer.choices[0].message.content == expected.text
        assert answer.saccade["video_tokens"] == expected.usage.video_tokens > 0
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    fewer: Any = client.chat.completions.create(**asking("video_url", inline, max_frames=2))
    assert fewer.saccade["video_tokens"] < expected.usage.video_tokens


def test_images_of_allowed_hosts(client: openai.OpenAI, grpc_client: saccade.Client, site: Site) -> None:
    expected = grpc_client.generate(QUESTION, images=[png(3)], **GREEDY)
    url = f"https://localhost:{site.port}/image.png"
    assert client.chat.completions.create(**asking("image_url", url)).choices[0].message.content == expected.text


@pytest.mark.parametrize("kind", ["image_url", "video_url"])
@pytest.mark.parametrize(
    ("url", "status", "code"),
    [
        ("https://example.org/clip.gif", 403, "MEDIA_HOST_DENIED"),
        ("http://localhost:{port}/clip.gif", 403, "MEDIA_HOST_DENIED"),  # not because of TLS
        ("https://user@localhost:{port}/clip.gif", 403, "MEDIA_HOST_DENIED"),
        ("https://169.254.169.254/latest", 403, "MEDIA_HOST_DENIED"),
        ("https://localhost:{port}/absent", 400, "MEDIA_FETCH_FAILED"),
        ("https://localhost:{port}/notes.txt", 400, None),
        ("data:video/mp4;base64,aGk=", 400, None),
        ("data:video/mp4,hello", 400, None),
        ("file:///etc/passwd", 400, "INVALID_ARGUMENT"),
        ("/etc/passwd", 400, None),
        ("", 400, None),
    ],
)
def test_everything_else_is_refused(
    client: openai.OpenAI, site: Site, kind: str, url: str, status: int, code: str | None
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**asking(kind, url.format(port=site.port)))
    assert caught.value.status_code == status and caught.value.code == (code or caught.value.code), caught.value
    assert "folder" not in str(caught.value), "over HTTP no path would be accepted"


def test_a_server_without_allowed_hosts_refuses_every_url(server: RunningServer) -> None:
    with (
        RunningServer(server.options.model, max_seqs=2, max_len=600) as closed,
        RunningHttp([closed.address]) as front,
        openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        pytest.raises(openai.PermissionDeniedError),
    ):
        client.chat.completions.create(**asking("video_url", "https://localhost:1/clip.gif"))
