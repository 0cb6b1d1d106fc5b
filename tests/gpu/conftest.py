"""Scripts for a GPU machine: the doctests of all files are not for them."""

collect_ignore_glob = ["jobs/*.py", "record_driver.py", "equality.py", "overhead.py"]
