"""torch's caching allocator as a machine: what a recorded program asked of it, answered under any settings.

requests   what the program asked, read off a replay: allocations, frees, empty_cache; and what the allocator did
rules      the settings and the release of torch that decide
machine    the allocator itself (`_machine.pyx`: the same, native)
driver     where the driver puts segments: as recorded, or by its own rules
run        which machine, which driver; the self-check against the recording
"""
