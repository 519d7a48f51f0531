"""Each part of a training run from its part of the config: a file per part. app.py puts them together."""
