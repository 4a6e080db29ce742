"""Chat with a server: replies as they stream, tools, structured output."""
