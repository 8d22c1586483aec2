"""Shapes and types of every annotated function are checked in the test run; users pay nothing."""

from beartype import BeartypeConf, beartype

# Numbers: an int is a fine float, as in PEP 484.
checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
