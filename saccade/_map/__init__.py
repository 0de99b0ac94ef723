"""`map`: runs many requests concurrently. Written twice, for threads and for asyncio tasks, on one shared `Window`."""
