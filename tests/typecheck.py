"""Checks shapes and types of all annotated functions in tests (see conftest.py), not for users."""

from beartype import BeartypeConf, beartype

# Numbers: an int is a fine float, as in PEP 484.
checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
