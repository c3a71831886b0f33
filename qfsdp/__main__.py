"""`python -m qfsdp` is the command `qfsdp`."""

from qfsdp.cli.command import main

if __name__ == "__main__":
    main()
