"""The process around a role: registration, heartbeats, control thread, step thread."""
