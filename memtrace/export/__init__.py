"""Answers in the formats of other programs, a module a format. They format; they compute nothing."""
