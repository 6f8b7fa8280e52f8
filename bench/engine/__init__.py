"""`twinpool bench engine`: what each part of the engine takes, beside what this machine's limits allow, in one run."""
