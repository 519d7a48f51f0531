"""What each switch of memory costs and saves, measured."""
