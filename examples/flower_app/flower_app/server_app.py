"""The server: drives the rounds of the method that the run configuration names."""

from fairvar.deploy.flower import server_app
from flower_app.data import data
from flower_app.model import model

app = server_app(model, data)
