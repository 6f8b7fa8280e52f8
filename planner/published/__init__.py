"""What others published, beside what this planner predicts of the same setting."""
