"""What watches a run: one module a feature. The loop calls them before and after a step, and at the log interval."""
