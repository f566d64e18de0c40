"""`python -m diglot`."""

from diglot.cli import main

main()
