"""Objects from their parts of the config, a file per concept; app.py and benchmark/jobs.py use them."""
