"""What the jobs of these tests run with, and the scripts among the tests, which are not to be imported."""

from __future__ import annotations

import os

os.environ["PYTHONUNBUFFERED"] = "1"  # a job that a signal ends takes with it what it printed and still holds

# Importing them changes torch, or starts a job.
collect_ignore = ["fake_cuda.py", "module_jobs.py", "world_job.py", "zero_jobs.py"]
