"""Recording training jobs: `launch` runs the command, `inside` runs in each of its ranks, `recording` is the API."""
