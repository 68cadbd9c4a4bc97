"""`python -m tether` is the `tether` command."""

from tether.cli import main

if __name__ == "__main__":
    main()
