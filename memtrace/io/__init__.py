"""Reading: a source, an unpickler that runs nothing, a parser for every torch release."""
