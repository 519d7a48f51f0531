"""What a run leaves on disk: its folder, its files, checkpoints between steps, weights."""
