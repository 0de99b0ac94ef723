"""Modules that every other package of `service` may import: options, errors, request types, API keys and limits, TLS,
channels between processes."""
