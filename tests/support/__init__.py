"""What several tests share: a running server as a process, prompts, and the reference's tokens."""
