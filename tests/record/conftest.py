"""Scripts that run in processes of their own: importing them changes torch, or starts a job."""

collect_ignore = ["fake_cuda.py", "module_jobs.py", "world_job.py", "zero_jobs.py"]
