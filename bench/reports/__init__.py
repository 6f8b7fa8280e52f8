"""What measurements become for their readers: one HTML file, plots, a timeline, a trace.

`model` has the types that comparisons and sweeps fill in; `page` makes the page, `plots` the files beside it, `trace`
what Perfetto opens.
"""
