"""One module per command of the `twinpool` command line: `add_parser` describes it, `run` does it."""
