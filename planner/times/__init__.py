"""Service times: how long a step and a transfer take on some hardware. Measured, fitted, tabulated or computed."""
