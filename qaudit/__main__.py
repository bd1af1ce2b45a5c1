"""`python -m qaudit` is `qaudit`."""

from qaudit.cli import main

if __name__ == "__main__":
    main()
