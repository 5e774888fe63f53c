"""Share of one site's throughput that is left when generation is spread over four far regions."""
