"""The commands of `zbpp`: one module or folder each, with `main(argv) -> exit status`."""
