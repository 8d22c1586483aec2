"""`python -m fairvar`: the command line, for machines on which nothing is installed."""

from fairvar.cli import main

main()
