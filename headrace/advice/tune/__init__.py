"""`headrace tune`: measures what the plan could only predict."""
