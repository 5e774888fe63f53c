"""Links of tests that are not about identity: plaintext over loopback, as an operator must write it down."""

from heterorl.common.identity.tls import ServerTlsConfig

PLAINTEXT = ServerTlsConfig(insecure=True)
