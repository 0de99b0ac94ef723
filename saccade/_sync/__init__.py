"""The synchronous façade, generated from `saccade/_async`."""
