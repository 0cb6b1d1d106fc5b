"""Answers: pure functions from a replayed snapshot to small frozen dataclasses. Nothing here prints."""
