"""`python -m stoop` is `stoop`."""

from stoop.cli.main import main

main()
