"""One rank: turns a SchedulerOutput into a RunnerOutput."""
