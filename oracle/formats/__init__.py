"""Plans, traces, run folders and how they lie on disk: what carries, and computes nothing."""
