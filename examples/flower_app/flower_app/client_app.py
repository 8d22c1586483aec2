"""A node: answers with its own data, which never leave it."""

from fairvar.deploy.flower import client_app
from flower_app.data import data
from flower_app.model import model

app = client_app(model, data)
