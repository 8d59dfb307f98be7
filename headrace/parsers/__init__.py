"""What a model's text says: reasoning, content and tool calls, read while the text is still being written."""
