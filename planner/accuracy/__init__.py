"""Predicted against measured: the same requests through the simulator and through real servers of this machine."""
