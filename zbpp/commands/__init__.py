"""The command line: `zbpp plan | train | bench | measure | explain | compare`, a file each."""
