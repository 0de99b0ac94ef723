"""Batches: files of requests that the server processes by itself."""
