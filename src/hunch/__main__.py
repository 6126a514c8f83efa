"""python -m hunch: the same as the `hunch` command."""

from hunch.cli import main

if __name__ == "__main__":
    main()
