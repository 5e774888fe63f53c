"""Links of tests that are not about identity: plaintext over loopback, as an operator must write it down."""

from services.common.tls import ServerTlsConfig

PLAINTEXT = ServerTlsConfig(insecure=True)
