"""What this machine does to an inference engine: checks, and the findings that they return."""
