"""Checks that the processes of a server fit into the machine's memory, before any of them is started."""

from __future__ import annotations

from kernels.machine_memory import machine_memory
from service.answers.prepare import decoder_processes
from service.common.config import ConfigError, ServerOptions

PROCESS_BYTES = 120 * 2**20
"""Memory that is counted for a frontend and for each of its image workers. Measured without an image: a frontend has
40 MiB of its own, the process that its workers are forked from 150, a worker 8."""


def check_process_memory(options: ServerOptions, memory: int | None = None) -> None:
    """Raises ConfigError if frontends and image workers would take more than half of the memory; the other half is for
    the model. `memory`: bytes; None: what this machine or container allows.

    The server starts all of these processes at once; without this check, too many could exhaust the machine's memory
    and with it stop other programs.
    """
    memory = machine_memory() if memory is None else memory
    half = memory // 2
    # Each frontend has at least this many workers, even if `image_workers` is lower.
    least = decoder_processes(1)
    frontends = half // ((1 + least) * PROCESS_BYTES)
    if options.frontends > max(1, frontends):
        raise ConfigError(
            f"frontends: {options.frontends} processes, each with {least} image workers, take more than half of "
            f"the {memory >> 20} MiB of memory of this machine or container; at most {max(1, frontends)} fit"
        )
    workers = half // PROCESS_BYTES - options.frontends
    if options.image_workers > max(least, workers):
        raise ConfigError(
            f"image_workers: {options.image_workers} processes of {PROCESS_BYTES >> 20} MiB take more than half of "
            f"the {memory >> 20} MiB of memory of this machine or container; at most {max(least, workers)} fit"
        )
