"""Run the command line as `python -m services`."""

from services.cli import main

main()
