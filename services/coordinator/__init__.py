"""The coordinator: versions policies, brokers weights, queues groups. Never imports torch."""
