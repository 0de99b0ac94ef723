"""The sides of a comparison: Saccade's server, and a peer in a process of its own. Both run the same workloads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import saccade
from benchmarks import gguf_model, machine
from benchmarks.workloads import Workload
from service.commands.server_process import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
TURN = 1.0
"""Minimum seconds of a side's turn; a single run of some hundredths of a second would be too noisy."""
SETTLE = 0.5
"""Seconds before each turn, because OpenMP threads of the other side spin for a while after their work."""


class Timed(NamedTuple):
    """One run of a workload: its seconds, and the seconds from its start to each request's first token if the side
    reports them."""

    seconds: float
    firsts: list[float]


class Ours:
    """Saccade's server behind gRPC, with one client thread per request."""

    def __init__(self, model: Path, options: Sequence[str] = (), most: int = 32, *, stream: bool = False) -> None:
        """`most`: maximum number of concurrent requests. `stream`: stream answers instead of sending them whole, and
        report the times to first tokens."""
        # Rounds repeat their prompts and the peer has no prefix cache, so Saccade runs without one too.
        fixed = ["--dtype", "bfloat16", "--max-seqs", str(most), "--state-cache", "none", "--log-level", "warning"]
        options = [*fixed, *options]
        self._server = ServerProcess([str(model), *options])
        self._client = saccade.Client(self._server.address)
        self._pool = ThreadPoolExecutor(most)
        self._stream = stream

    def run(self, workload: Workload) -> Timed:
        started = time.perf_counter()

        def ask(index: int) -> list[float]:
            first: list[float] = []
            # Random bytes after the image, which decoders ignore, give it a new key in the embedding cache.
            images = [file.read_bytes() + os.urandom(8) for file in workload.images[index]]
            fixed: dict[str, Any] = {
                "images": images, "max_tokens": workload.new_tokens, "temperature": 0, "ignore_eos": True,
            }  # fmt: skip
            if self._stream:
                with self._client.stream(workload.prompts[index], **fixed) as stream:
                    for _ in stream:
                        first = first or [time.perf_counter() - started]
                    answer = stream.final()
            else:
                answer = self._client.generate(workload.prompts[index], **fixed)
            assert len(answer.token_ids) == workload.new_tokens
            return first

        firsts = [first for each in self._pool.map(ask, range(len(workload.prompts))) for first in each]
        return Timed(time.perf_counter() - started, firsts)

    def ids(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy answers, one prompt after the other."""
        fixed: dict[str, Any] = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        return [list(self._client.generate(prompt, **fixed).token_ids) for prompt in prompts]

    def peak_bytes(self) -> int:
        """Peak memory of the server's processes, in bytes."""
        return sum(machine.peak_bytes(pid) for pid in machine.family(self._server.pid))

    def close(self) -> None:
        self._client.close()
        self._pool.shutdown()
        self._server.stop()


def peer_command(peer: str, model: Path, kind: str = "bf16", tokens: int = 512) -> list[str]:
    """The command line that starts a peer's process for a model.

    For llama.cpp, `kind` is the type of its weights and `tokens` the length of its slots (the maximum number of tokens
    of a prompt and its answer); PEER_BUILD in the environment is the instruction set of its build. `SystemExit` if the
    peer's environment is missing.
    """
    if peer == "transformers":
        return [sys.executable, "-m", "benchmarks.peer_transformers"]
    if peer == "llamacpp":
        folder, limit = Path("~/.cache/saccade/peers/llamacpp").expanduser(), os.environ.get("PEER_BUILD")
        server = folder / (f"build-{limit}" if limit else "build") / "bin" / "llama-server"
        if not server.exists():
            setup = f"benchmarks/setup_llamacpp.sh {limit or ''}".rstrip()
            raise SystemExit(f"llama.cpp's server is missing; run {setup} first")
        file = gguf_model.converted(model, folder, kind)
        return [sys.executable, str(ROOT / "benchmarks" / "peer_llamacpp.py"), str(server), str(file), str(tokens)]
    python = Path("~/.cache/saccade/peers/vllm/bin/python").expanduser()
    if not python.exists():
        raise SystemExit("vLLM's environment is missing; run benchmarks/setup_vllm.sh first")
    return [str(python), str(ROOT / "benchmarks" / "peer_vllm.py")]


class Peer:
    """The peer process; its output goes to `log`."""

    def __init__(
        self, peer: str, model: Path, omni: bool, log: Path, device: str = "cpu", kind: str = "bf16", tokens: int = 512,
        *, tokenizer: bool = False,
    ) -> None:  # fmt: skip
        """`tokenizer`: vLLM loads the model's tokenizer, which grammars need."""
        self.peak_bytes = 0
        self._log = log
        environment, command = dict(os.environ), peer_command(peer, model, kind, tokens)
        if peer == "vllm":
            environment.pop("PYTHONPATH", None)
            # Otherwise modules of this folder would hide modules of the same names that vLLM imports.
            environment["PYTHONSAFEPATH"] = "1"
            # vLLM rejects prompts longer than the positions in config.json even for models that use no positions.
            environment["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
            # As vLLM's documentation recommends; vLLM warns that it is slower without.
            environment["LD_PRELOAD"] = str(Path(command[0]).parent.parent / "lib" / "libiomp5.so")
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command, cwd=ROOT if peer == "transformers" else log.parent, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment,
            )  # fmt: skip
        self._ask({"load": str(model), "omni": omni, "device": device, "tokenizer": tokenizer, "tokens": tokens})

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            tail = "".join(self._log.read_text(errors="replace").splitlines(keepends=True)[-15:])
            raise RuntimeError(f"the peer ended with code {self._process.wait()}; the end of {self._log}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, workload: Workload) -> Timed:
        answer = self._ask(
            {
                "prompts": workload.prompts,
                "images": [[str(file) for file in files] for files in workload.images],
                "new_tokens": workload.new_tokens,
            }
        )
        assert answer["tokens"] == workload.output_tokens
        self.peak_bytes = answer["peak_bytes"]
        return Timed(answer["seconds"], answer.get("firsts", []))

    def ids(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """Token ids of greedy answers; supported by llama.cpp only."""
        answers = [self._ask({"prompts": [each], "new_tokens": new_tokens, "ids": True})["ids"] for each in prompts]
        return [list(answer[0]) for answer in answers]

    def constrained(
        self, prompts: list[list[int]], schema: dict[str, Any] | None, most: int | list[int]
    ) -> dict[str, Any]:
        """Supported by vLLM only: `seconds`, `tokens` and, in `ended`, the texts of answers that end by themselves
        under a JSON schema within `most` tokens; without a schema, answers of exactly these numbers of tokens."""
        return self._ask({"prompts": prompts, "schema": schema, "most": most})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def turn(side: Ours | Peer, load: Workload, times: int) -> list[Timed]:
    """Several consecutive runs, which begin when the other side's threads are idle."""
    time.sleep(SETTLE)
    return [side.run(load) for _ in range(times)]
