"""The server: drives the rounds of the method that the run configuration names."""

from fairvar.flower import server_app

app = server_app()
