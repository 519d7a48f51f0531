"""More messages under way on each link, for links with a long latency: messages_ahead."""
