"""A node: answers with its own data, which its node configuration names."""

from fairvar.deploy.flower import client_app
from flower_app.model import make_model

app = client_app(make_model)
