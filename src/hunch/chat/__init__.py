"""What a chat's answer holds besides text: tool calls and reasoning, as each family writes them."""
