"""Who holds what, in integers only, no torch. Reading order: `grid`, `pieces`, `stages`, `schedules`, `clock`."""
