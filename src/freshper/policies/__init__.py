"""Policies: who writes the replies. One file per engine."""
