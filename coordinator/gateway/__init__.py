"""The HTTP endpoint: who may ask, what is asked, and the answer on its way to the client."""
