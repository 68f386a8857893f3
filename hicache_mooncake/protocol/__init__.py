"""What an engine and its node say to each other. Pure: bytes and shared words, no sockets."""
