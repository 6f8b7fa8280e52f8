"""Running beyond one machine. Nothing here yet."""
