"""A node: answers with its own data."""

from fairvar.flower import client_app

app = client_app()
