"""`/v1/responses`: OpenAI's newer route, in terms of a chat request."""
