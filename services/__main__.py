"""Run the command line as `python -m services`."""

from services.entry import main

main()
