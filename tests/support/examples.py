"""How many random examples a test of the coordinator looks at."""

import os


def examples(count: int) -> int:
    """So many on SQLite and files; a quarter where each statement or payload is a round trip to a server.

    What is looked for is in the operations, which are the same ones there.
    """
    far = (os.environ.get("HETERORL_TEST_STORE", "sqlite"), os.environ.get("HETERORL_TEST_PAYLOADS", "files"))
    return count if far == ("sqlite", "files") else max(1, count // 4)
