"""Pool ratios: profile a worker, simulate deployments with the cores that serve, plan, and tune while running."""
