"""Messages between stages with fewer bytes: fewer_bytes; what they are turned into: codes."""
