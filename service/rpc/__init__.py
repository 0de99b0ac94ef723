"""gRPC: services, statuses and the interceptor."""
