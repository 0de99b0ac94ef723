"""gRPC: protos in, protos out."""
