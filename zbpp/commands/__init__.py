"""The command line: `zbpp plan | train | bench | measure | memory | explain | compare | hang | export`.

Each command has a file of its own, plan a folder.
"""
