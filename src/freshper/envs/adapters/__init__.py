"""Adapters: environments that were written for something else, as ours."""
