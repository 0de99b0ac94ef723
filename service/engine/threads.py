"""How many threads compute on a CPU, and what would make them slow."""

from __future__ import annotations

import logging

import torch

from kernels.cores import Cores, available_cores
from service.common.config import EngineOptions
from service.engine.runner_options import resolve_device

log = logging.getLogger(__name__)


def use_threads(options: EngineOptions) -> None:
    """Sets the number of threads of this process, and logs it."""
    cores = available_cores()
    torch.set_num_threads(options.threads or cores.usable)
    log.info("computation: %s", describe_threads(options, cores))
    warn_of_threads(options, cores)


def describe_threads(options: EngineOptions, cores: Cores) -> str:
    """The number of threads and the cores on which they run."""
    threads = options.threads or cores.usable
    return f"{threads} thread{'' if threads == 1 else 's'} on {cores}"


def warn_of_threads(options: EngineOptions, cores: Cores) -> None:
    """Logs warnings of more threads than cores, and of memory that is far from some of them."""
    if options.threads is not None and options.threads > cores.usable:
        log.warning(
            "threads: %d are more than the %d that can run at the same time (%s): threads wait for each other",
            options.threads, cores.usable, cores,
        )  # fmt: skip
    if len(cores.nodes) > 1 and resolve_device(options).startswith("cpu"):
        log.warning(
            "this process may run on the NUMA nodes %s, and reads the memory of other nodes more slowly: start one "
            "server for each node, such as with numactl --cpunodebind=%d --membind=%d",
            ", ".join(map(str, cores.nodes)), cores.nodes[0], cores.nodes[0],
        )  # fmt: skip
