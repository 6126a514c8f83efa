"""The `hunch` command, and `python -m hunch`."""

from __future__ import annotations


def main() -> None:
    """Run the command line. Ctrl-C while its modules are read leaves as quietly as later on."""
    try:
        from hunch.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
