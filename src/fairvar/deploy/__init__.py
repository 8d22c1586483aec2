"""Messages, client and server of a deployment.

Transports carry the messages: `LocalTransport` (`run.py`) calls clients in this process, with
faults where a test wants them; `fairvar.deploy.flower` sends them over Flower."""
