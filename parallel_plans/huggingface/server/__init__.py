"""A server that speaks OpenAI's HTTP interface, over a continuous batch of all ranks."""
