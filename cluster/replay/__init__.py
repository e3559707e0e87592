"""Traffic replayed against an OpenAI endpoint: traces, workloads, a load client, raw results."""
