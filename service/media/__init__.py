"""Turns untrusted files into patches: uploads, URLs, and decoding in separate processes."""
