"""Where workers run: what starts and ends them for a coordinator, on this host or by an operator's command."""
