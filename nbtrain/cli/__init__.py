"""The command line, thin over the client."""
