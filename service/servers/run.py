"""Runs `saccade serve`: one server, several frontends over one engine, or an encoder alone."""

from __future__ import annotations

from kernels.host_memory import release_program_pages
from service.common.config import ServerOptions
from service.common.helper_process import log_to_stderr, torch_imports
from service.common.process_limits import allow_descriptors
from service.engine.engine_client import Loading, SupervisedEngine
from service.media.image_pool import ImagePool
from service.model.assets import ModelAssets
from service.model.hub import fetched
from service.servers.from_options import load_assets, make_image_pool
from service.servers.frontends import serve_frontends
from service.servers.http_process import http_beside
from service.servers.lifetime import run_to_end, started, stop_signals, unless_stopped, until_stopped
from service.servers.preflight import check_options
from service.servers.server import Server


async def serve(options: ServerOptions) -> int:
    """Runs a server until SIGTERM or SIGINT. Prints the ready line once health is SERVING. Returns the exit code."""
    stopping = stop_signals()

    def build(loading: Loading) -> tuple[SupervisedEngine, ModelAssets, ImagePool]:
        assets = load_assets(options)
        pool = make_image_pool(options, assets)
        try:
            pool.start()  # before the engine, so that both import torch at the same time
            engine = SupervisedEngine(options, loading=loading)
        except BaseException:
            pool.close()
            raise
        return engine, assets, pool

    async with http_beside(options) as http:
        built = await unless_stopped(build, stopping)
        if built is None:
            return 0
        engine, assets, pool = built
        try:
            server = Server(options, engine, assets, image_pool=pool)
            if http is not None:
                server.private_socket, server.tell_log_level = http.socket_of(0), http.tell_log_level
            engine.on_change, engine.on_give_up = server.engine_changed, server.engine_given_up
            ready = await started(server.start(), stopping)
        except BaseException:
            engine.close()
            pool.close()
            raise
        if ready:
            await until_stopped(server, stopping, options, http)
        else:
            await server.stop(grace=0)
    return 0


def run(options: ServerOptions) -> int:
    """Runs `saccade serve`: sets up logging, checks the options, runs the server. Returns the exit code."""
    log_to_stderr(options.log_level)
    allow_descriptors()
    check_options(options)
    release_program_pages()
    options = fetched(options)
    if options.role == "encoder":
        # Imported here because it imports torch, which a frontend does not need.
        with torch_imports():
            from service.servers.encoder_server import serve_encoder

        return run_to_end(serve_encoder(options))
    if options.frontends > 1:
        return run_to_end(serve_frontends(options))
    return run_to_end(serve(options))
