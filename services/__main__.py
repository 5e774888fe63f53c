"""Run the command line as `python -m heterorl`."""

from heterorl.entry import main

main()
