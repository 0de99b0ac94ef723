"""Transports: gRPC in threads, gRPC in asyncio, and the engine in this process."""
