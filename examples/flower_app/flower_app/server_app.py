"""The server: drives the rounds of the method that the run configuration names."""

from fairvar.deploy.flower import server_app
from flower_app.model import make_model

app = server_app(make_model)
