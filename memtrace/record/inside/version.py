"""The release of memtrace that this was copied from."""

VERSION = "0.1.0"
