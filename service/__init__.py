"""The Saccade server: gRPC front, engine wiring, embedding handoff, checkpoints, configuration."""
