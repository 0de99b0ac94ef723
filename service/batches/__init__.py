"""Batches: files of requests that the server processes in the background."""
