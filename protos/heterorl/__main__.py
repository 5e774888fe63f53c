"""Run the command line as `python -m heterorl`."""

from heterorl.launch import main

if __name__ == "__main__":
    main()
