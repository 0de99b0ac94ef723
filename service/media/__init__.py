"""Untrusted files become patches: uploads, URLs, and decoding in processes of their own."""
