"""`/v1/messages`: Anthropic's route, in terms of a chat request."""
