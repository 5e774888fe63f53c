"""Run the fuzzing and print cases and crashes of each target.

    python -m campaigns.fuzz --cases 1000000              so many cases for each target, on all cores
    python -m campaigns.fuzz --target chunk2 --case 4711  one case again, with its traceback

A crash is anything but a valid result or one of this project's own errors: another exception, an assertion, more memory
than the cap. A case depends only on its target and number, so it can be repeated.
"""

from __future__ import annotations

import argparse
import sys

from campaigns.fuzz.targets import TARGETS, fuzz, repeat


def main() -> int:
    """Returns 1 if anything crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="cases for each target")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="only this one; may be repeated")
    parser.add_argument("--processes", type=int, default=0, help="0 is one a core")
    parser.add_argument("--case", type=int, help="repeat this case of the one target")
    arguments = parser.parse_args()
    names = arguments.target or sorted(TARGETS)
    if arguments.case is not None:
        repeat(names[0], arguments.case)
        return 0
    print(f"{'target':12} {'cases':>10} {'refused':>10} {'crashes':>8} {'cases/s a core':>15}")
    crashed = False
    for name in names:
        result = fuzz(name, cases=arguments.cases, first=arguments.first, processes=arguments.processes)
        print(
            f"{name:12} {result.cases:10,} {result.refused:10,} {len(result.crashes):8} {result.speed:15,.0f}",
            flush=True,
        )
        for number, text in result.crashes[:5]:
            print(f"    case {number}: {text}")
        crashed = crashed or bool(result.crashes)
    return int(crashed)


if __name__ == "__main__":
    sys.exit(main())
