"""`python -m oracle` is the command line."""

from oracle.cli import main

if __name__ == "__main__":
    main()
