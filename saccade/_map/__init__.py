"""`map`: runs many requests concurrently. Implemented twice, for threads and for asyncio tasks, over the same
`Window`."""
