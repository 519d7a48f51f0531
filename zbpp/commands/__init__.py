"""The command line: `zbpp plan | train | bench | measure | memory | explain | compare`, a file each."""
