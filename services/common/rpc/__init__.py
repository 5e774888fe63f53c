"""Transport: servers, channels, interceptors and retries over grpc.aio."""
