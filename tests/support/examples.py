"""How many random examples a test looks at."""

import os

MORE = "HETERORL_TEST_EXAMPLES"
"""Names a factor; `make test-all` sets it."""


def examples(count: int) -> int:
    """So many at a landing; a quarter where each statement or payload is a round trip to a server.

    What is looked for is in the operations, which are the same ones there.
    """
    count *= int(os.environ.get(MORE, "1"))
    far = (os.environ.get("HETERORL_TEST_STORE", "sqlite"), os.environ.get("HETERORL_TEST_PAYLOADS", "files"))
    return count if far == ("sqlite", "files") else max(1, count // 4)
