"""From a config to a finished run, and to an exported model."""
