"""Parts of multi-turn generation: tool calls out of text, tool results into tokens."""
