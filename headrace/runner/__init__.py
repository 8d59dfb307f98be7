"""Computes on one rank what a SchedulerOutput asks for, and returns a RunnerOutput."""
