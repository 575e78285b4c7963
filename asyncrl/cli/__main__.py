"""`python -m asyncrl.cli`: the `asyncrl` command, where the script is not on the path."""

from asyncrl.cli import main

if __name__ == "__main__":
    main()
