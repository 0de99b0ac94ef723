"""The Saccade server: gRPC frontend, engine wiring, embedding handoff, checkpoints, configuration."""
