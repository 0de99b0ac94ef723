"""The asyncio façade: the one that is written by hand."""
