"""A federation of clients that are somewhere else: what travels, what a client answers, what the
server accepts and makes of it. No transport is built in here: `local` runs clients in this process
(and lets them misbehave), `fairvar.deploy.flower` runs them on Flower."""
