"""Configurations, stored runs, sweeps and their workers."""
