"""Moving KV blocks between workers: layout plans, manifests, the ownership ledger, and the transports."""
