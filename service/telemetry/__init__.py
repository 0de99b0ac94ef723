"""Observability: metrics, traces, the access log, the context of a call, the file of image sizes."""
