"""Messages and stubs of the `saccade.v1` protocol, generated from `protos/saccade/v1` by `make protos`."""
