"""Builds and checks what a release publishes: `make wheels`, `make release-check`; docs/releasing.md."""
