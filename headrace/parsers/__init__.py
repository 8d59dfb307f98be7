"""Tells reasoning, content and tool calls apart in a model's text, while the text is still being written."""
