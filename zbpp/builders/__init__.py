"""Objects from their parts of the config, a file per concept."""
